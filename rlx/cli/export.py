"""Exports a checkpoint's policy for transformers and vLLM: rlx export RUN [--checkpoint best]

Left out: how the folder is written (rlx.runs.export).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlx.cli import listing
from rlx.cli.arguments import add_storage
from rlx.cli.options import CommandParser, exit_code
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.runs import run_folder
from rlx.storage import signatures
from rlx.storage.addresses import local_folder, storage_above
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import StorageError
from rlx.tracking.services import artifact_places, mlflow, mlflow_errors
from rlx.tracking.services.mlflow import MLflowService
from rlx.tracking.services.reachable import check_mlflow

SHOWN = (*listing.LISTED_METRICS, "eval/ema/accuracy")


def main(argv: Sequence[str] | None = None) -> int:
    args = _argument_parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return exit_code(lambda: write(args))


def _argument_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        description="Writes a checkpoint's policy as a Hugging Face folder, adapters merged in, and compares what was "
        "written with the trainer's own model.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's name, NAME@STEP, or the folder or address of a checkpoint")
    parser.add_argument("--checkpoint", metavar="STEP", help="newest (default), best, or a step's number")
    parser.add_argument("--out", metavar="DIR", help="new folder for it (default: exports/RUN-step_000040)")
    parser.add_argument(
        "--weights", choices=("policy", "average"), default="policy", help="average: that of train.ema_decay"
    )
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, as peft loads them")
    parser.add_argument("--register", metavar="NAME", help="also a new version of this registered model in MLflow")
    add_storage(parser)
    parser.set_defaults(storage=None)  # what is given comes before what a checkpoint's address and settings say
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code of the model's folder (model.trust_remote_code) and use the tracking address, also of a "
        "checkpoint that another person wrote, or this one elsewhere",
    )
    return parser


def write(args: argparse.Namespace) -> int:
    """Finds the checkpoint, exports it, and prints what it is and how to load it."""
    check_model_name(args.register)
    out = free_folder(args, args.out) if args.out else None
    usual = args.storage or RunConfig().storage
    address, checkpoint = run_folder.checkpoint_of(which(args.run, args.checkpoint), usual)
    manifest = checkpoint.manifest
    assert manifest
    config = run_config(args, address, checkpoint)
    uri = registry(args, config.tracking.uri, address, checkpoint) if args.register else ""
    folder = out or free_folder(args, default_folder(args, f"{config.name}-{checkpoint.name}"))
    from rlx.runs import export  # slow to import

    difference = export.export(checkpoint, export.Export(config, args.weights == "average", args.adapter), folder)
    metrics = "  ".join(f"{name} {manifest.metrics[name]:.4g}" for name in SHOWN if name in manifest.metrics)
    print(f"exported run {config.name}, step {manifest.step}, {args.weights} weights, {config.model.dtype}: {metrics}")
    print(f"to {folder}")
    print(f"largest difference of a log-probability from the trainer's: {difference:.2g}")
    print(f"load it: {loading(folder, args.adapter)}")
    if args.register:
        version = registered(uri, str(manifest.mlflow_run_id), folder, args.register)
        print(f"registered as {args.register}, version {version}: {MLflowService(uri).browse_command()}")
    return 0


def check_model_name(name: str | None) -> None:
    """Raises ConfigError if MLflow takes no registered model of a name: before the export, which takes long."""
    if name is None or (name.strip() and not set(name) & set("/:")):
        return
    hint = re.sub(r"[\s/:]+", "-", name).strip("-")
    raise ConfigError(
        f"--register {name}: MLflow takes no name with / or : and no empty one" + (f"; nearest: {hint}" if hint else "")
    )


def run_config(args: argparse.Namespace, address: str, checkpoint: CheckpointEntry) -> RunConfig:
    """Returns the config of the checkpoint's run, with the address of a storage for its model.

    That is --storage, or the one that the checkpoint lies in today: what it was written in may be another person's
    choice.
    """
    tree = run_folder.inherited_settings(checkpoint, print, trust=args.trust, used=signatures.USED_BY_EXPORTS)
    config = from_tree(tree, f"checkpoint {checkpoint.name}")
    return config.model_copy(update={"storage": args.storage or storage_above(address) or RunConfig().storage})


def registry(args: argparse.Namespace, uri: str | None, address: str, checkpoint: CheckpointEntry) -> str:
    """Returns the address of the MLflow store that has the checkpoint's run: before the export, which takes long.

    Args:
        uri: what `tracking.uri` of the checkpoint's run says.

    Raises:
        ConfigError: MLflow has no such run, or does not answer.
    """
    manifest, as_well = checkpoint.manifest, "without --register it is exported all the same"
    assert manifest
    if manifest.mlflow_run_id is None:
        raise ConfigError(
            f"--register {args.register}: MLflow has no run of this checkpoint: it had not answered when the "
            f"checkpoint was written, or tracking.backends left it out; {as_well}"
        )
    instead = ""
    if not uri:
        folder = local_folder(tracking_storage(args, address, checkpoint))
        uri = artifact_places.database_uri(folder / artifact_places.DATABASE)
        instead = "--storage names another storage; "
    check_mlflow(uri)
    try:
        if (file := artifact_places.database(uri)) and not file.exists():  # which a look would make
            raise ConfigError("there is no such database")
        mlflow.get_run(uri, manifest.mlflow_run_id)
    except Exception as error:  # each kind of MLflow store has its own errors
        where = mlflow_errors.without_password(uri)
        raise ConfigError(
            f"--register {args.register}: MLflow at {where}: {mlflow_errors.cause(error)}; {instead}{as_well}"
        ) from None
    return uri


def tracking_storage(args: argparse.Namespace, address: str, checkpoint: CheckpointEntry) -> str:
    """Returns the address of the storage that has the MLflow database with the checkpoint's run.

    It is --storage, or the one that the checkpoint lies in. One that lies elsewhere was copied out of the storage that
    it was written in, which is believed if this user has written it, or trusts it, and the database is there.
    """
    manifest = checkpoint.manifest
    assert manifest
    if known := args.storage or storage_above(address):
        return str(known)
    recorded = str(manifest.config["storage"])
    is_own = args.trust or signatures.is_own(manifest.config, manifest.signature)
    return recorded if is_own and has_database(recorded) else RunConfig().storage


def has_database(storage: str) -> bool:
    """Whether a storage is a folder of this machine that has an MLflow database, and this user may look into it."""
    if not storage.startswith(("/", "file://")):
        return False
    with suppress(OSError, StorageError):
        return (local_folder(storage) / artifact_places.DATABASE).is_file()
    return False


def default_folder(args: argparse.Namespace, name: str) -> str:
    """Returns exports/RUN-step_000040, with a suffix if the average or the adapters are exported."""
    suffix = ("-average" if args.weights == "average" else "") + ("-adapter" if args.adapter else "")
    return f"exports/{name}{suffix}"


def registered(uri: str, run_id: str, folder: Path, name: str) -> str:
    """Registers the exported model in MLflow; returns its version.

    Raises:
        ConfigError: MLflow does not take it.
    """
    try:
        return mlflow.register(uri, run_id, folder, name)
    except Exception as error:  # each kind of MLflow store has its own errors
        raise ConfigError(f"--register {name}: {mlflow_errors.cause(error)}; the model is in {folder}") from None


def which(run: str, step: str | None) -> str:
    """Returns RUN and --checkpoint as one name.

    Raises:
        ConfigError: both are given, but RUN names a checkpoint already.
    """
    if step is None:
        return run
    if listing.run_of(run) != run:
        raise ConfigError(f"--checkpoint {step} needs a run's name, folder or address: {run} names a checkpoint")
    return f"{run}@{step}"


def free_folder(args: argparse.Namespace, out: str) -> Path:
    """Returns the folder to write.

    Raises:
        ConfigError: it exists and is not empty.
    """
    folder = Path(out).expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = f"--out {out} exists already: give another folder, or delete it"
        if not args.out:
            problem = f"{out} exists already: --out names another folder"
        again = "; --register registers a model as it is exported, so export it again" if args.register else ""
        raise ConfigError(problem + again)
    return folder


def loading(folder: Path, adapter: bool) -> str:
    """Returns the line of Python that loads the model."""
    if adapter:
        return f'peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")'
    return f'transformers.AutoModelForCausalLM.from_pretrained("{folder}")'
