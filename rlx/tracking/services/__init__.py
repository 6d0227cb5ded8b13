"""The tracking services: MLflow, TensorBoard and Weights & Biases, each behind `TrackingService` and `RunWriter`.

Only MLflow is read back, by sweeps, their analysis and exports. Left out: how records reach a service (delivery.py).

Example:
    from pathlib import Path
    from rlx.tracking.services.tensorboard import TensorBoardService

    service = TensorBoardService(Path("storage/tensorboard"))
    run_id = service.make_run("a key", "rlx", "one", parent=None, params={"seed": "0"}, tags={}, at=1)
    service.writer(run_id).log({"reward/mean": 0.5}, step=0, at=2)
    print(service.browse_command())
"""
