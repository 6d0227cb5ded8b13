"""Numbers out of a run: metric names, the tracker that records them in a tracking service, and the console.

Left out: computing metrics (rlx.training.metrics) and analyzing sweeps (rlx.analysis).

Imports of rlx: config, storage, types.

Example:
    from pathlib import Path
    from rlx.storage.filesystem import Storage
    from rlx.tracking.base import RunStatus
    from rlx.tracking.services.mlflow import MLflowService
    from rlx.tracking.tracker import OutboxTracker

    tracker = OutboxTracker([MLflowService("sqlite:///mlflow.db")], Storage.local(Path("runs/one")), "driver")
    tracker.open("rlx", "one", params={"train.actor_lr": 1e-5}, tags={"rlx.kind": "run"})
    tracker.log({"reward/mean": 0.5}, step=0)
    tracker.end(RunStatus.FINISHED)
    assert tracker.close(patience_s=60) == 0
"""
