"""What a run leaves in its folder beside checkpoints, read back with care: config.yaml, run.json, result.json; and
which checkpoint of which run a person means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.loading import from_tree, parse_yaml, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections import DEFAULT_METRIC, flatten
from rlx.storage import checkpoint_catalog
from rlx.storage.addresses import join_address, open_storage, resolve_address
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import Storage, retry

T = TypeVar("T")

# Settings that are not inherited from a checkpoint.
_OWN_TO_GIVE = ("model.trust_remote_code", "reward.url", "reward.url_key_env", "tracking.uri", "ray_address")

# What the state of a run depends on: a resumed one cannot change it.
_FIXED = (
    "seed",
    "model.",
    "data.",
    "algorithm.advantage",
    "algorithm.policy_loss",
    "train.ema_decay",
    "checkpoint.init_",
)


def exists(folder: Storage) -> bool:
    """Whether there is a run in a folder."""
    return (folder / "run.json").exists()


def write(file: Storage, text: str) -> None:
    """Writes a record; StorageError if the storage fails for good."""
    retry(partial(file.write_text, text), f"writing {file.path}")


def check_new(config: RunConfig, folder: Storage) -> None:
    """ConfigError if the folder holds a run already."""
    if exists(folder):
        raise ConfigError(f"run {config.name!r} exists in {folder.path}: --resume {config.name} continues it")


def find(runs: Storage, name: str) -> Storage:
    """The folder of a run; ConfigError if there is none of that name, with the nearest."""
    if not exists(runs / name):
        raise ConfigError(f"no run {name!r} in {runs.path}{nearest(name, runs.names())}")
    return runs / name


def saved_config(folder: Storage) -> dict[str, Any]:
    """The config tree of an existing run; ConfigError if there is none in the folder."""
    if not exists(folder):
        raise ConfigError(f"no run to resume in {folder.path}")

    file = folder / "config.yaml"
    return _read(file, lambda: dict(parse_yaml(file.read_text())))


def mlflow_run(folder: Storage) -> str:
    """The id of a run's MLflow run; ConfigError if its record cannot be read."""
    file = folder / "run.json"

    def run_id() -> str:
        if not isinstance(found := file.read_json()["mlflow_run"], str):
            raise TypeError(found)
        return found

    return _read(file, run_id)


def finished(config: RunConfig, folder: Storage) -> dict[str, Any] | None:
    """The last step's metrics of a run that has done all its steps; None if there are some left."""
    file = folder / "result.json"
    if not file.exists():
        return None

    def metrics() -> dict[str, Any]:
        content = file.read_json()
        if not all(isinstance(value, int | float) for value in content.values()):
            raise TypeError(content)
        return content | {"step": int(content["step"])}

    last = _read(file, metrics)
    return last if last["step"] >= config.train.steps else None


def is_fixed(key: str) -> bool:
    """Whether a setting cannot change once a run has begun."""
    return key.startswith(_FIXED)


def check_resumable(config: RunConfig, saved: RunConfig) -> None:
    """ConfigError if a run that has begun as `saved` cannot go on as `config`: other weights, prompts or estimators."""
    now, then = flatten(config), flatten(saved)
    for key in now:
        if is_fixed(key) and now[key] != then[key]:
            raise ConfigError(f"{key} is {then[key]} in run {saved.name}, which cannot change now: start a new run")


def checkpoint_of(which: str, storage: str) -> tuple[str, CheckpointEntry]:
    """The checkpoint that a person means, and its address.

    Args:
        which: a run's name or NAME@STEP, where STEP is a number, newest (if left out) or best; or the folder or
            address of a checkpoint, or of a run.
        storage: address of the storage that a named run is in.

    Raises:
        ConfigError, StorageError: there is no such run, or no such whole checkpoint of it.
    """
    place, _, step = which.rpartition("@") if "@" in which.rpartition("/")[2] else (which, "", "")
    if "/" in place:
        address, folder = resolve_address(place), open_storage(place, create=False)
        if checkpoint_catalog.is_checkpoint_name(folder.name):
            return address, _sound(checkpoint_catalog.read_checkpoint(folder))
    else:
        address = join_address(storage, "runs", place)
        folder = find(open_storage(storage, create=False) / "runs", place)
    found = checkpoint_catalog.find_checkpoint(folder, step or "newest", *_rating(folder))
    return join_address(address, found.name), found


def settings_of(found: CheckpointEntry, say: Callable[[str], None]) -> dict[str, Any]:
    """The settings in a checkpoint, for a new run; but those by which a stranger's file could run code here or send
    something elsewhere only as their defaults, which is said."""
    assert found.manifest
    tree, defaults = found.manifest.config, flatten(RunConfig())
    taken = flatten(from_tree(tree))
    left = {key: defaults[key] for key in _OWN_TO_GIVE if taken[key] != defaults[key]}
    if left:
        say(f"not taken from {found.name}, give them again if they are meant: {', '.join(left)}")
    return with_overrides(tree, left)


def check_start(config: RunConfig) -> None:
    """ConfigError if a new run cannot start from the checkpoint that its config names."""
    if not config.checkpoint.init_from:
        return
    found = _sound(checkpoint_catalog.read_checkpoint(open_storage(config.checkpoint.init_from, create=False)))
    if config.checkpoint.init_state == "all":
        assert found.manifest
        if found.step >= config.train.steps:
            raise ConfigError(f"train.steps ({config.train.steps}) are all done at step {found.step}: ask for more")
        check_resumable(config, from_tree(found.manifest.config | {"checkpoint": config.checkpoint.model_dump()}))


def _sound(found: CheckpointEntry) -> CheckpointEntry:
    if not found.manifest:
        raise ConfigError(f"checkpoint {found.folder.path} is not complete: {found.problem}")
    return found


def _rating(folder: Storage) -> tuple[str, str]:
    """By which metric the run's best checkpoint is the best, and whether more of it is better."""
    settings = from_tree(saved_config(folder)).checkpoint if exists(folder) else RunConfig().checkpoint
    return settings.best_by or DEFAULT_METRIC, settings.best_mode


def _read(file: Storage, content: Callable[[], T]) -> T:
    """The content of a file; ConfigError that names it if it cannot be read, or is not what was written."""
    try:
        return content()
    except OSError as error:
        raise ConfigError(f"{file.path} cannot be read: {one_line(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise ConfigError(f"{file.path} is damaged: it is not what rlx wrote") from None
