"""Generation: the protocol of an engine, the vLLM engine, a rank's pool of engines, and the group that all ranks share.

Seeds follow from (run seed, step, prompt, sample), so completions do not depend on which engine generates them. A dead
or hung engine is replaced, gets the weights again, and its prompts go to the others. Left out: which prompts are asked
for and how many steps ahead (rlx/training), and the scores of completions (rlx/rewards).

The modules `base`, `engine_args`, `engine_thread` and `fake_engine` run without Ray.

Imports of rlx: actors, config, mesh, types.

Example:
    from rlx.rollout.fake_engine import FakeEngines
    from rlx.types import Prompt, Sampling

    engines = FakeEngines(seed=0)
    engines.push(0)  # the engines have the weights of version 0
    prompt = Prompt(0, token_ids=(5, 6), question="1 + 1?", answer="2")
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=(0,))
    pending = engines.begin([prompt], [sampling] * 4, version=0)  # four completions of the prompt
    completions = engines.finish(pending, version=0)
    assert len(completions) == 4
"""
