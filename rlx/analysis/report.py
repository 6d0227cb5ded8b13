"""The analysis of a sweep as files: tables, a static picture, the best candidate as YAML, and one page with everything.

Left out: reading the sweep (loading.py), statistics (statistics.py, rlx.analysis.comparison), and what the page shows
(rlx.analysis.page). To confirm a winner, run it again on fresh seeds.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlx.analysis import loading, static_figure, statistics, tables
from rlx.analysis.comparison.evidence import EVIDENCE_FILE, Evidence, as_json, weigh
from rlx.analysis.comparison.wording import sweep_verdict
from rlx.analysis.loading import SettingValue, Sweep, Trial
from rlx.analysis.statistics import Group, best_first, group_trials
from rlx.config.errors import ConfigError, one_line
from rlx.config.experiment import with_experiment
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections.base import Section, flatten
from rlx.config.sweep import Mode
from rlx.storage.filesystem import StorageError, replace_file
from rlx.tracking.services import mlflow

_LOG = logging.getLogger("rlx")
SETTINGS = "settings"
"""the title of the comparison of all candidates, which every analysis has"""
_AGAINST = "against "  # what the title of a comparison with another sweep begins with
_LOCATION_KEYS = ("name", "storage")  # settings that say where a run is stored, not what it does


Withheld = Callable[[Trial, Mapping[str, Any]], Mapping[str, Any]]
"""(trial, the tree of its config) -> those of its settings that are not handed on, by dotted key"""


def withhold_nothing(trial: Trial, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Withholds nothing: for a sweep of this user, or one whose settings are trusted."""
    return {}


def write_report(
    sweep: Sweep,
    folder: Path,
    uri: str,
    metric: str,
    mode: Mode,
    compared: Mapping[str, Sequence[Group]],
    evidence: Evidence,
    withheld: Withheld = withhold_nothing,
) -> list[Path]:
    """Writes tables, pictures and the page into a folder and stores them with the MLflow run of the sweep.

    The run also gets the result in one sentence as its description, and the mean of the best candidate as its metric,
    unless the analysis is by another metric than the sweep's own: its files have a folder of their own in MLflow, too.

    Args:
        compared: see `comparisons`.
        evidence: see `evidence_of`.
        withheld: see `best_yaml`.

    Returns:
        The paths of the files.

    Raises:
        StorageError: the folder cannot be written; files of an earlier analysis are still there.
    """
    from rlx.analysis.page import sections  # imports plotly, which is slow

    candidates = compared[SETTINGS]
    recipe = best_yaml(sweep, candidates, uri, withheld)
    texts = {
        "analysis.html": sections.render(sweep, compared, evidence, recipe, uri, metric, mode),
        EVIDENCE_FILE: as_json(evidence, metric),
        "trials.csv": tables.trial_table(sweep, metric, mode).to_csv(index=False),
    }
    texts |= {"best.yaml": recipe} if recipe else {}
    files = {name: text.encode() for name, text in texts.items()} | _comparison_files(compared, sweep.name, metric)
    paths = _write(folder, files)
    place = other_place(sweep, metric, mode)
    mlflow.log_files(uri, sweep.run_id, paths, f"analysis/{place}" if place else "analysis")
    if place:
        return paths
    description = f"{sweep_verdict(candidates, evidence, metric)} analysis/analysis.html has the rest."
    mlflow.log_summary(uri, sweep.run_id, description, _best_metrics(candidates, evidence, metric))
    return paths


def other_place(sweep: Sweep, metric: str, mode: Mode) -> str:
    """The folder within a sweep's analysis for one by another metric, so that it does not replace the sweep's own.

    Empty for the sweep's own metric.
    """
    is_own = (metric, mode) == (sweep.metric, sweep.mode)
    return "" if is_own else f"{mode}_{metric.replace('/', '_')}"


def comparisons(
    sweep: Sweep, metric: str, mode: Mode, by: str | None = None, against: Sweep | None = None
) -> dict[str, list[Group]]:
    """The groups to compare by the title of the comparison, each list best first: always the candidates of the sweep.

    Args:
        by: also compare the values of this varied setting.
        against: also compare the best candidate with that of another sweep.

    Raises:
        ConfigError: the metric was not loaded, or `by` was not varied.
    """
    compared = {SETTINGS: group_trials(sweep, metric, mode)}
    if by:
        compared[f"by {by}"] = group_trials(sweep, metric, mode, by)
    if against:
        winners = (
            _winner(sweep.name, compared[SETTINGS]),
            _winner(against.name, group_trials(against, metric, mode)),
        )
        compared[f"{_AGAINST}{against.name}"] = best_first(winners, mode)
    return compared


def evidence_of(sweep: Sweep, compared: Mapping[str, Sequence[Group]], uri: str, metric: str, mode: Mode) -> Evidence:
    """What the compared runs prove, see `comparisons`."""
    others = next((groups for title, groups in compared.items() if title.startswith(_AGAINST)), ())
    return weigh(uri, compared[SETTINGS], metric, mode, others, sweep.looks)


def _best_metrics(candidates: Sequence[Group], evidence: Evidence, metric: str) -> dict[str, float]:
    """What the sweep's run in MLflow shows of its best candidate: its mean, and what to expect of it on fresh seeds."""
    seen = {metric: candidates[0].mean} if candidates[0].is_compared else {}
    return seen | ({f"{metric}/expected": evidence.winner.fresh.value} if evidence.winner else {})


def best_yaml(sweep: Sweep, candidates: Sequence[Group], uri: str, withheld: Withheld = withhold_nothing) -> str:
    """The best candidate as YAML for `rlx train --config`, without the seed if seeds were varied.

    What is withheld stands in a comment. Empty if no candidate is compared, or if the config of the best trial is not
    in MLflow, comes from another version of rlx, or cannot be written as YAML.
    """
    if not candidates[0].is_compared:
        return ""
    trial = candidates[0].ended[0]
    seed = {statistics.SEED} & set(sweep.varied)
    try:
        config = loading.run_config(uri, trial)
        left_out = withheld(trial, config.model_dump(mode="json"))
        tree = minimal_tree(config, without=seed | set(left_out), keep=set(sweep.varied) - seed - set(left_out))
        text = yaml.safe_dump(tree, sort_keys=False) if tree else ""
    except ConfigError:
        return ""
    except yaml.YAMLError as error:  # the page is worth more than this file
        _LOG.warning("warning: no best.yaml: %s", one_line(error, 300))
        return ""
    comment = f"# The best setting of the sweep {sweep.name}; all other settings have their defaults.\n"
    comment += "# The trial changed while it ran: these are its last settings.\n" if trial.origins else ""
    if left_out:
        values = "".join(f"#   {key}: {json.dumps(_plain(value))}\n" for key, value in left_out.items())
        comment += "# Somebody else wrote these, which name code, models or addresses; analyze --trust takes them:\n"
        comment += values
    return comment + text


def minimal_tree(config: RunConfig, without: Set[str] = frozenset(), keep: Set[str] = frozenset()) -> dict[str, Any]:
    """The smallest settings tree that a command makes a config of again, except for its name, storage and `without`.

    Args:
        without: dotted keys to leave out.
        keep: dotted keys that stay even if they have their default.
    """
    left_out = {*_LOCATION_KEYS, *without}
    values = {key: _plain(value) for key, value in flatten(config).items() if key not in left_out}
    wanted = from_tree(with_experiment(with_overrides({}, values)))

    def is_enough(fewer: Mapping[str, Any]) -> bool:
        try:
            return from_tree(with_experiment(with_overrides({}, fewer))) == wanted
        except ConfigError:
            return False

    groups = [[key for key in values if key not in keep]]
    while groups:  # most are needless: all at once, or else by halves
        group = groups.pop()
        fewer = {key: value for key, value in values.items() if key not in group}
        if is_enough(fewer):
            values = fewer
        elif len(group) > 1:
            groups += [group[len(group) // 2 :], group[: len(group) // 2]]
    for key in [key for key in values if key not in keep]:  # a default may depend on what was left out since
        fewer = {other: value for other, value in values.items() if other != key}
        values = fewer if is_enough(fewer) else values
    return with_overrides({}, values)


def _plain(value: Any) -> Any:
    """The value of a setting as YAML and JSON have it: each entry of a list such as data.sources as a mapping."""
    if not isinstance(value, tuple):
        return value
    return [
        each.model_dump(mode="json", exclude_defaults=True) if isinstance(each, Section) else each for each in value
    ]


def _write(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files into a folder, each at once; returns their paths.

    Raises:
        StorageError: the disk is full, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, content)
    except OSError as error:
        raise StorageError(
            f"the analysis cannot be written to {folder}: {error.strerror}; --out names another"
        ) from None
    return [folder / name for name in files]


def _comparison_files(compared: Mapping[str, Sequence[Group]], sweep_name: str, metric: str) -> dict[str, bytes]:
    """The content of a table and a picture for each comparison by file name, tables first."""
    texts, pictures = dict[str, bytes](), dict[str, bytes]()
    for name, groups in compared.items():
        title, stem = f"{sweep_name}: {metric}, {name}", name.replace(" ", "_")
        table = tables.format_table(tables.group_table(groups))
        texts[f"{stem}.md"] = f"# {title}\n\n{table}\n".encode()
        picture = io.BytesIO()
        static_figure.draw(groups, title, metric).savefig(picture, dpi=150)
        pictures[f"{stem}.png"] = picture.getvalue()
    return texts | pictures


def _winner(sweep_name: str, groups: Sequence[Group]) -> Group:
    """The best of a sweep's candidates, with the name of the sweep."""
    best, settings = groups[0], dict[str, SettingValue](sweep=sweep_name)
    label = f"{sweep_name}: {best.label}"
    return replace(best, label=label, settings=settings | best.settings, chosen_from=len(groups))
