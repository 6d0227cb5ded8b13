"""Files on a disk, a network mount or S3, and the checkpoints of runs on them.

Left out: what the numbers in a checkpoint mean (rlx.training) and the other files of a run (rlx.runs).
Only checkpoint_files, checkpoint_writer and rank_group need torch: code that only lists checkpoints does not import
them, and stays fast.

Imports of rlx: config, mesh, types.

Example:
    from rlx.storage import checkpoint_catalog
    from rlx.storage.addresses import open_storage

    runs = open_storage("storage", create=False) / "runs"
    for name in runs.names():
        print(name, [entry.step for entry in checkpoint_catalog.complete_checkpoints(runs / name)])
"""
