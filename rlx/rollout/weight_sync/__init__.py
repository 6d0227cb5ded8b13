"""Weights from the trainers' FSDP shards to the engines: versioned, checksummed, in buckets, with deadlines.

One file for each transport (shared_memory, process_group, object_store), each with a sending and a receiving end, whose
phases are prepare, connect, send, receive, finish. An engine that dies or hangs is left out and named; the others get
their weights. Left out: when weights are pushed (rlx/training), and how an engine loads them (receiver.py has vLLM's).

It imports rlx.config, rlx.types, rlx.actors and rlx.mesh; not the rest of rlx.rollout.

Example:
    import torch
    from rlx.mesh import Mesh
    from rlx.models.lora import engine_weights
    from rlx.rollout.engine_pool import EnginePool
    from rlx.rollout.weight_sync.sync import WeightSync

    def send(policy: torch.nn.Module, pool: EnginePool) -> None:  # every rank calls it
        sync = WeightSync(pool.engines, Mesh.of("cuda", tp=1), torch.device("cuda"), torch.bfloat16)
        failed = sync.push(engine_weights(policy), version=7, locations=pool.probe(1.0))
        print({index: str(error) for index, error in failed.items()})  # the engines that did not take version 7
        sync.close()
"""
