"""Generation: the protocol of an engine, the vLLM engine, a rank's pool of engines, and the group that all ranks share.

Seeds follow from (run seed, step, prompt, sample), so completions do not depend on which engine generates them. A dead
or hung engine is replaced, gets the weights again, and its prompts go to the others. Left out: which prompts are asked
for and how many steps ahead (rlx/training), and the scores of completions (rlx/rewards).

It imports rlx.config, rlx.types, rlx.actors and rlx.mesh. Ray is imported in engine_actors, engine_pool, engine_group,
vllm_engine and weight_sync; `base` and `fake_engine` run in a plain process.

Example:
    from rlx.rollout.fake_engine import FakeEngines
    engines = FakeEngines(seed=0)
    engines.push(0)
    pending = engines.begin([Prompt(0, (5, 6), "question", "answer")], [sampling] * 4, version=0)
    completions = engines.finish(pending, version=0)
"""
