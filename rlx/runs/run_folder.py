"""Reads the records in a run's folder (config.yaml, run.json, result.json) and resolves what names a checkpoint.

The records may be damaged or come from someone else: every problem becomes an error of one line.
Left out: the checkpoints' own files (rlx.storage) and what is written while a run trains (`launch`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, TypeVar

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.experiment import following_engines, tell_followers
from rlx.config.loading import from_tree, parse_yaml, with_overrides
from rlx.config.run import RunConfig, valid_name
from rlx.config.sections.base import differences, flatten
from rlx.config.sweep import DEFAULT_METRIC
from rlx.data import sources
from rlx.rewards.custom import RewardError, brief
from rlx.storage import checkpoint_catalog, claims, signatures
from rlx.storage.addresses import join_address, open_storage, resolve_address
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.filesystem import Storage, StorageError
from rlx.types import Notify

T = TypeVar("T")
POINTER = "pointer.json"
"""file of a checkpoint of Ray that only names the path of another one, on the same storage"""

# Settings that the state of a run depends on: a resume cannot change them.
_FIXED = (
    "seed",
    "model.",
    "data.",
    "algorithm.advantage",
    "algorithm.policy_loss",
    "train.ema_decay",
    "train.optimizer",
    "checkpoint.init_",
)


# ---------------------------------------------------------------------------------------------------------------------
# Records


def holds_run(folder: Storage) -> bool:
    """Returns whether a folder holds a run. A record alone is that of a trial that failed before its run began."""
    return (folder / "run.json").exists() and (folder / "config.yaml").exists()


@contextmanager
def keeping_details(folder: Storage) -> Iterator[None]:
    """Writes what a failed reward function was called with, and its traceback, into the folder of a run or sweep."""
    try:
        yield
    except RewardError as error:
        if not error.details:
            raise
        file = folder / f"reward_error_{time.strftime('%Y-%m-%d_%H:%M:%S')}.txt"
        try:
            file.write_text(f"{error}\n\n{error.details}")
        except OSError as problem:
            raise RewardError(f"{error}; not kept in full: {one_line(problem)}") from None
        raise RewardError(f"{error}; in full in {file}") from None


def check_new(name: str, folder: Storage) -> None:
    """Raises ConfigError if the folder holds a run already."""
    if holds_run(folder):
        raise ConfigError(f"run {name!r} exists in {folder}: --resume {name} continues it")


def find(name: str, storage: str) -> tuple[str, Storage]:
    """Returns the address and the folder of a run by its name.

    Raises:
        ConfigError: there is no run of that name; the text has the nearest name, or the trials of a sweep.
    """
    root = open_storage(storage, create=False)
    runs, names = root / "runs", (root / "runs").names()
    if name in names and holds_run(runs / name):  # whatever somebody has renamed its folder to
        return join_address(storage, "runs", name), runs / name
    if name in names and name == valid_name(name) and (runs / name).size() is None:  # no file of a desktop
        interrupted = f"has not begun, its start was interrupted: rlx train --name {name} begins it"
        state = f"is being started by {holder}" if (holder := claims.holder(runs / name)) else interrupted
        raise ConfigError(f"run {name!r} in {runs} {state}")
    if name in (root / "sweeps").names():
        trial = join_address(storage, "sweeps", name, "runs", "trial_00000")
        raise ConfigError(f"no run {name!r} in {runs}: {name} is a sweep, its trials are {trial}, ...")
    begun = [each for each in names if holds_run(runs / each)]
    raise ConfigError(f"no run {name[:128]!r} in {runs}{nearest(name, begun)}")


def locate(which: str, storage: str) -> tuple[str, Storage]:
    """Returns the address and the folder of a run that a person names.

    Args:
        which: its name, or its folder or address.
        storage: address of the storage that a named run is in.

    Raises:
        ConfigError, StorageError: there is no such run.
    """
    if "/" not in which:
        return find(which, storage)
    address, folder = resolve_address(which), open_storage(which, create=False)
    if not holds_run(folder):
        holder = claims.holder(folder)
        instead = f": it is being started by {holder}" if holder else _instead_of(folder, address)
        raise ConfigError(f"no run in {folder}{instead}")
    return address, folder


def _instead_of(run: Storage, address: str) -> str:
    """Says what a folder is in place of a run's, and where it belongs; empty if that is not known, or it is none.

    Args:
        address: of the folder, as the text names it.
    """
    try:
        names = run.names()
    except NotADirectoryError:
        return ""
    if "runs" in names:  # it is a sweep, or a storage
        return _instead_of(run / "runs", join_address(address, "runs"))
    if "config.json" in names:
        return f": it is the folder of a model; --model.path {address} trains it, transformers loads it"
    if "adapter_config.json" in names:
        return ": it has only adapters of a model; --from continues those of a run"
    models = ("models", "config.json", "--model.path {} trains one, transformers loads it")
    for held, file, use in (models, ("runs", "run.json", "give one of them, e.g. {}")):
        if found := list(itertools.islice((name for name in names[:100] if (run / name / file).exists()), 3)):
            return f": it holds {held} ({', '.join(found)}); {use.format(join_address(address, found[0]))}"
    return "" if names or run.exists() else ": there is no such folder"


def saved_config(folder: Storage) -> dict[str, Any]:
    """Returns the config tree of a run.

    Raises:
        ConfigError: the folder holds no run, or its config cannot be read.
    """
    if not holds_run(folder):
        raise ConfigError(f"no run to resume in {folder}")
    file = folder / "config.yaml"
    return _read(file, lambda: dict(parse_yaml(file.read_text())))


def finished_metrics(folder: Storage, steps: int) -> dict[str, Any] | None:
    """Returns the last step's metrics if the run has done `steps` steps, else None.

    Raises:
        ConfigError: result.json cannot be read.
    """
    file = folder / "result.json"
    if not file.exists():
        return None

    def metrics() -> dict[str, Any]:
        content = file.read_json()
        if not all(isinstance(value, int | float) for value in content.values()):
            raise TypeError(content)
        return content | {"step": int(content["step"])}

    last = _read(file, metrics)
    return last if last["step"] >= steps else None


def _read(file: Storage, content: Callable[[], T]) -> T:
    """Returns `content()`; a file that cannot be read or parsed becomes a ConfigError that names it."""
    try:
        return content()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise ConfigError(f"{file} is damaged: it is not what rlx wrote") from None


# ---------------------------------------------------------------------------------------------------------------------
# New and saved runs


@contextmanager
def new_run(config: RunConfig) -> Iterator[tuple[RunConfig, Storage]]:
    """Claims the folder of a new run; gives the config with a name, and the folder.

    Raises:
        ConfigError: there is a run of that name.
        ClaimedError: another process starts one.
    """
    with claims.take_new(open_storage(config.storage) / "runs", config.name, "run", "ppo") as claim:
        name = claim.folder.name
        check_new(name, claim.folder)
        yield config.model_copy(update={"name": name}), claim.folder


@contextmanager
def saved_run(
    name: str, storage: str, overrides: Mapping[str, Any], *, trust: bool = False, giver: str = "command line"
) -> Iterator[tuple[RunConfig, Storage, dict[str, Any] | None]]:
    """Claims the folder of a run; gives the config with which it continues, the folder, and its `finished_metrics`.

    Args:
        storage: the address of the run's storage, which may have been moved since it began.
        overrides: settings for the rest of the run, by dotted key.
        trust: take all settings, whoever wrote them.
        giver: where the overrides come from, for errors.

    Raises:
        ConfigError: there is no such run, a setting that cannot change would change, somebody else wrote settings
            that name code, models, addresses or patterns, or its checkpoints are gone.
        ClaimedError: another process trains it.
    """
    if overrides.get("name", name) != name:
        raise ConfigError(f"name {overrides['name']}: run {name!r} keeps its name; --from {name} starts another one")
    check_stays(f"run {name!r}", storage, overrides)
    _, folder = find(name, storage)
    if (valid := valid_name(name)) != name:
        raise ConfigError(f"run {name!r} goes on by no such name: rename {folder} to {valid} first")
    with claims.take(folder, f"run {name!r}"):
        saved = saved_config(folder)
        if not (trust or signatures.is_own_folder(folder, saved)):
            refuse_powers(name, folder, saved, overrides)
        tree = _as_it_began(saved) | {"name": name, "storage": storage}
        engines = following_engines(tree, overrides)
        changes = {**engines, **overrides, "name": name}
        config = from_tree(with_overrides(tree, changes), f"run {name}", overrides, giver)
        check_resumable(config, from_tree(tree))
        if (metrics := finished_metrics(folder, config.train.steps)) is None:
            _check_checkpoints(folder)
            tell_followers(engines)
        yield config, folder, metrics


def _as_it_began(saved: dict[str, Any]) -> dict[str, Any]:
    """Adds train.shuffle_minibatches: False to the config tree of a run that is older than that setting."""
    train = saved.get("train")
    return saved | {"train": {"shuffle_minibatches": False, **train}} if isinstance(train, Mapping) else saved


def check_stays(what: str, storage: str, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError if overrides would have a run or sweep go on in another storage than the one it is in."""
    if overrides.get("storage", storage) != storage:
        raise ConfigError(f"storage {overrides['storage']}: {what} stays where it is, which is looked for in {storage}")


def _check_checkpoints(folder: Storage) -> None:
    """Raises ConfigError if all checkpoints of a run are damaged, or gone: it would begin again, over its record.

    A run that was killed before its first one was complete has had none, and begins again.
    """
    had_some = (folder / checkpoint_catalog.SAVED).exists() or finished_metrics(folder, 0) is not None
    saved = checkpoint_catalog.settled_checkpoints(folder, had_some)
    if saved and not any(entry.manifest for entry in saved):
        newest = f"the newest, {saved[-1].name}, cannot be used: {saved[-1].problem}"
        instead = "put its files back, or start a new run"
        raise ConfigError(f"run {folder.name!r} has no whole checkpoint in {folder}: {newest}; {instead}")
    if had_some and not saved:
        raise ConfigError(
            f"run {folder.name!r} has had checkpoints, and none of them is left in {folder}: put one back with "
            "all of its files, or start a new run; this one would begin again, over its record"
        )


def is_fixed(key: str) -> bool:
    """Returns whether a setting cannot change once a run has begun."""
    return key.startswith(_FIXED)


def check_resumable(config: RunConfig, saved: RunConfig) -> None:
    """Raises ConfigError if a setting that cannot change differs between a resume and the saved run."""
    for key, now, before in differences(config, saved):
        if is_fixed(key) and not _has_moved(before, now):
            raise ConfigError(f"{key} is {before} in run {saved.name}, which cannot change now: start a new run")


def _has_moved(before: Any, now: Any) -> bool:
    """Whether two values name a file of one name in two folders: on another machine it may lie elsewhere."""
    paths = [PurePath(each) for each in (before, now) if isinstance(each, str)]
    return len(paths) == 2 and all(path.is_absolute() for path in paths) and paths[0].name == paths[1].name


def checkpoint_of(which: str, storage: str) -> tuple[str, CheckpointEntry]:
    """Returns the checkpoint that a person names, and its address.

    Args:
        which: a run's name or NAME@STEP, where STEP is a number, newest (the default) or best; or the folder or
            address of a checkpoint, or of a run.
        storage: address of the storage that a named run is in.

    Raises:
        ConfigError, StorageError: there is no such run, or no such complete checkpoint of it.
    """
    run, _, step = which.rpartition("@") if "@" in which.rpartition("/")[2] else (which, "", "newest")
    if "/" in run:
        address, folder = resolve_address(run), open_storage(run, create=False)
        if checkpoint_catalog.is_checkpoint_name(folder.name):
            return address, _complete(checkpoint_catalog.read_checkpoint(folder))
        if not (holds_run(folder) or checkpoint_catalog.list_checkpoints(folder)):
            raise StorageError(f"no complete checkpoint in {folder}{_instead_of(folder, address)}")
    else:
        if os.path.isfile(f"{run}/config.json") and not (open_storage(storage, create=False) / "runs" / run).exists():
            return checkpoint_of(f"./{which}", storage)  # a model, which the error says
        address, folder = find(run, storage)
    settings = (from_tree(saved_config(folder)) if holds_run(folder) else RunConfig()).checkpoint
    best_by = settings.best_by or DEFAULT_METRIC
    entry = checkpoint_catalog.find_checkpoint(folder, step, best_by, settings.best_mode)
    return join_address(address, entry.name), entry


def pointed_checkpoint(folder: Storage) -> CheckpointEntry:
    """Returns the complete checkpoint in a folder, or the one that the folder's pointer names.

    Raises:
        ConfigError, StorageError: there is none.
    """
    if (pointer := folder / POINTER).exists():
        folder = Storage(folder.filesystem, _read(pointer, lambda: str(pointer.read_json()["path"])))
        if not folder.exists():
            raise ConfigError(f"checkpoint {folder} was deleted: a run keeps checkpoint.keep_last of them and its best")
    return _complete(checkpoint_catalog.read_checkpoint(folder))


def inherited_settings(
    checkpoint: CheckpointEntry,
    notify: Notify,
    *,
    trust: bool = False,
    needed: Collection[str] = (),
    used: Collection[str] = signatures.POWERFUL,
) -> dict[str, Any]:
    """Returns the settings in a checkpoint, for a new run or an export.

    Of a checkpoint that somebody else wrote, settings that name code, models, addresses or patterns are reset to their
    defaults, with a message.

    Args:
        trust: take all of them, whoever wrote them.
        needed: settings that are taken all the same.
        used: those of these settings that the caller uses; the others stay as they are.
    """
    manifest = checkpoint.manifest
    assert manifest
    if trust or signatures.is_own(manifest.config, manifest.signature):
        return manifest.config
    left = [key for key in signatures.powers(manifest.config) if key in used and key not in needed]
    if left:
        notify(
            f"settings not taken from {checkpoint.name}, which this user did not write: {', '.join(left)}. "
            f"Give them again, or --trust to take all"
        )
    defaults = flatten(RunConfig())
    return with_overrides(manifest.config, {key: defaults[key] for key in left})


def refuse_powers(name: str, folder: Storage, saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError if settings name code, models, addresses or patterns, and are not given again."""
    if left := [f"{key} {brief(value)}" for key, value in signatures.powers(saved).items() if key not in overrides]:
        raise ConfigError(
            f"this user did not write run {name!r}, whose settings name code, models or addresses: {', '.join(left)}. "
            f"Read {folder}/config.yaml; --trust takes them"
        )


def check_start(config: RunConfig, *, is_new: bool = True) -> None:
    """Raises ConfigError if a run cannot start from its checkpoint, or the prompts of a new one do not go together."""
    if is_new and config.checkpoint.init_state != "all":  # which goes on with the prompts of another run
        sources.check_new_prompts(config.data, config.eval)
    if not config.checkpoint.init_from:
        return
    checkpoint = _complete(checkpoint_catalog.read_checkpoint(open_storage(config.checkpoint.init_from, create=False)))
    assert checkpoint.manifest
    if config.checkpoint.init_state == "weights":
        then, now = from_tree(checkpoint.manifest.config).model.lora_rank, config.model.lora_rank
        if then != now:
            raise ConfigError(
                f"model.lora_rank is {then} in checkpoint {checkpoint.folder}, not {now}: rlx export makes a "
                "folder of its model, and --model.path starts from that"
            )
    elif checkpoint.step >= config.train.steps:
        raise ConfigError(f"train.steps ({config.train.steps}) are all done at step {checkpoint.step}: ask for more")
    else:
        check_resumable(config, from_tree(checkpoint.manifest.config | {"checkpoint": config.checkpoint.model_dump()}))


def _complete(checkpoint: CheckpointEntry) -> CheckpointEntry:
    if not checkpoint.manifest:
        raise ConfigError(f"checkpoint {checkpoint.folder} is not complete: {checkpoint.problem}")
    return checkpoint
