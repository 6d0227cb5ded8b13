"""Rewards: from completions and expected answers to scores, and training a reward model.

`functions` has the built-in reward functions in one table, `custom` loads functions of the user, `reward_model` and
`remote` ask a model or a web address, `scoring` calls all of them and adds up their scores by weight, `completions`
does so for what engines have generated. `preferences` trains a reward model on pairs. Left out: penalties for length
and clipping or normalising scores, which training does.

Imports of rlx: actors, config, mesh, types.

Example:
    from rlx.config.sections.reward import RewardConfig
    from rlx.rewards import scoring
    from rlx.types import Prompt, Response

    config = RewardConfig(functions={"numeric": 1.0, "length": 0.1}, length_target=8)
    response = Response(Prompt(0, (), "1 + 1?", "2"), text="2.0", answer="2.0", num_tokens=4, finished=True)
    scorers = scoring.scorers(config, lambda: lambda answers: [0.0] * len(answers))  # of the task; `numeric` judges
    scores = scoring.score([response], scorers, config)
    assert (scores.total, scores.is_correct) == ([0.95], [True])
"""
