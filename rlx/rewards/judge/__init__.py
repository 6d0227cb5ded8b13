"""A language model as a judge, behind an address that speaks OpenAI's chat protocol.

`rubric` makes the text that a judge reads and finds the verdict in its reply, `cache` keeps replies so that a resumed
run asks nothing twice, `scorer` is the scorer that uses both. Left out: the connection (rlx.rewards.json_server).

Example:
    from rlx.config.sections.reward import RewardConfig
    from rlx.rewards.judge.cache import ReplyCache
    from rlx.rewards.judge.scorer import Judge

    config = RewardConfig(functions={"judge": 1.0}, judge_url="http://127.0.0.1:8001/v1", judge_model="Qwen/Qwen3-8B")
    judge = Judge.from_config(config, ReplyCache())
    assert judge.address == "http://127.0.0.1:8001/v1/chat/completions"
    # judge(responses).scores has a score in [0, 1] for each response, once a server answers at that address
"""
