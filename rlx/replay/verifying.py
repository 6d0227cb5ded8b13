"""Whether the record of a run holds: what it was made with against what is here, and some of its steps done again.

Left out: doing the steps (branches.py) and comparing them (comparing.py).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlx.config.errors import ConfigError
from rlx.config.loading import steps_differ_in
from rlx.replay.recorded import RecordedRun
from rlx.runs import launch
from rlx.runs.preflight import PreparedRun
from rlx.storage import checkpoint_catalog, signatures
from rlx.tracking import provenance
from rlx.tracking.provenance import Provenance

_SHOWN = 12  # characters of a checksum


@dataclass(frozen=True)
class Fact:
    """Something that a run was made with, and the same here."""

    what: str
    recorded: str
    here: str
    agrees: bool | None  # None: the run does not say


def replayable(run: RecordedRun, logged: Collection[int], most: int) -> list[int]:
    """The steps that can be done again with at most so many steps: those after the start, and after checkpoints.

    Left out are steps after its last one, which a resume gave up, and steps whose settings nothing tells.
    """
    starts = [0, *(each.step for each in run.checkpoints)]
    near = {step for start in starts for step in range(start + 1, start + most + 1) if step in logged}
    return sorted(step for step in near if step <= run.steps and not run.unknown_at(step))


def drawn_steps(steps: Sequence[int], count: int, seed: int) -> list[int]:
    """Some of the steps by chance, in their order.

    Raises:
        ConfigError: there are none.
    """
    if not steps:
        raise ConfigError("no step that was logged can be done again")
    return sorted(random.Random(seed).sample(list(steps), min(count, len(steps))))


def facts(run: RecordedRun, prepared: PreparedRun) -> list[Fact]:
    """Compares what a run was made with and what is here: code, libraries, machine, settings, files, checkpoints.

    Args:
        prepared: the run as it can be started here.

    Raises:
        ConfigError, StorageError: a file cannot be read.
    """
    return [*facts_of_environment(run, prepared), facts_of_settings(run), facts_of_checkpoints(run)]


def facts_of_environment(run: RecordedRun, prepared: PreparedRun) -> list[Fact]:
    """Code, libraries, machine and files."""
    made = provenance.read_provenance(run.folder)
    here = provenance.made_here(launch.input_files(prepared))
    if made is None:
        return [Fact("made with", "not recorded", f"rlx {here.rlx}", None)]
    pairs = [
        ("code of rlx", f"{made.rlx} {made.code[:_SHOWN]}", f"{here.rlx} {here.code[:_SHOWN]}"),
        *((name, made.libraries.get(name, "-"), version) for name, version in here.libraries.items()),
        ("machine", made.machine, here.machine),
    ]
    return [Fact(what, before, now, before == now) for what, before, now in pairs] + facts_of_files(made, here)


def facts_of_files(made: Provenance, here: Provenance) -> list[Fact]:
    """The files of each setting that names some, by checksum; earlier versions did not record all settings."""
    facts = []
    for setting in sorted({name.rpartition("/")[0] for name in (*made.files, *here.files)}):
        before, now = made.files_of(setting), here.files_of(setting)
        if not before:
            facts.append(Fact(setting, "not recorded", f"{len(now)} files", None))
            continue
        changed = provenance.changed_files(before, now)
        said = f"not the same: {', '.join(changed)}" if changed else "the same"
        facts.append(Fact(setting, f"{len(before)} files by checksum", said, not changed))
    return facts


def facts_of_settings(run: RecordedRun) -> Fact:
    """Whether the checkpoints have the settings that the run's folder has, and whether this user has signed them."""
    manifests = [each.manifest for each in run.checkpoints if each.manifest]
    changed = {key for each in manifests for key in steps_differ_in(each.config, run.newest)}
    is_own = signatures.is_own_folder(run.folder, dict(run.newest))
    here = f"checkpoints differ in {', '.join(sorted(changed))}" if changed else "the checkpoints have the same"
    return Fact("settings", "signed by this user" if is_own else "not signed by this user", here, not changed)


def facts_of_checkpoints(run: RecordedRun) -> Fact:
    """Whether every file of every checkpoint has its checksum."""
    damaged = []
    for each in run.checkpoints:
        try:
            checkpoint_catalog.verify(each, each.manifest.files if each.manifest else ())
        except checkpoint_catalog.DamagedError as error:
            damaged.append(str(error))
    count = len(run.checkpoints)
    return Fact("checkpoints", f"{count} by checksum", "; ".join(damaged) or "as they were written", not damaged)
