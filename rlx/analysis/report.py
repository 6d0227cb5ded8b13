"""A sweep's analysis as files: tables, a static picture, the best setting as YAML, and one page that holds it all.

Reading is records.py's, statistics comparison.py's, what the page shows page.py's. Left out: tests of significance
corrected for the number of settings; who has picked a winner runs it again on fresh seeds.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlx.analysis import loading, static_figure, statistics, tables
from rlx.analysis.loading import Setting, Sweep
from rlx.analysis.statistics import Group, Mode, best_first, groups, summary_sentence
from rlx.analysis.tables import format_table, table
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.config.sections import DEFAULT_METRIC, flatten
from rlx.tracking import mlflow

_PLACE = ("name", "storage")  # settings that say where a run is kept, not what it does


def write(
    sweep: Sweep,
    folder: Path,
    uri: str,
    metric: str = DEFAULT_METRIC,
    mode: Mode = "max",
    by: str | None = None,
    against: Sweep | None = None,
) -> list[Path]:
    """Writes tables, pictures and the page into a folder and stores them with the sweep's MLflow run; their paths.

    That run gets the answer as its description, and the mean of the best setting as its own value of the metric.
    What is compared, and the errors, are those of `compared`.
    """
    from rlx.analysis import page  # plotly takes its time

    shown = compared(sweep, metric, mode, by, against)
    recipe = best_settings(sweep, shown["settings"], uri)
    texts = {
        "analysis.html": page.render(sweep, shown, recipe, uri, metric, mode),
        "trials.csv": tables.trial_table(sweep, metric, mode).to_csv(index=False),
    }
    texts |= {"best.yaml": recipe} if recipe else {}
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, found in shown.items():
        title, file = f"{sweep.name}: {metric}, {name}", name.replace(" ", "_")
        texts[f"{file}.md"] = f"# {title}\n\n{format_table(table(found))}\n"
        static_figure.figure(found, title, metric).savefig(folder / f"{file}.png", dpi=150)
        pictures.append(f"{file}.png")
    for file, text in texts.items():
        (folder / file).write_text(text)
    paths = [folder / file for file in (*texts, *pictures)]
    mlflow.log_files(uri, sweep.run_id, paths, "analysis")
    _describe(sweep, shown["settings"], uri, metric)
    return paths


def _describe(sweep: Sweep, found: Sequence[Group], uri: str, metric: str) -> None:
    """Gives a sweep's own MLflow run, which else is an empty row, its answer and its best mean."""
    door = mlflow.client(uri)
    door.set_tag(
        sweep.run_id, "mlflow.note.content", f"{summary_sentence(found, metric)} analysis/analysis.html has the rest."
    )
    if found[0].values:
        door.log_metric(sweep.run_id, metric, found[0].mean, step=0)


def compared(
    sweep: Sweep, metric: str = DEFAULT_METRIC, mode: Mode = "max", by: str | None = None, against: Sweep | None = None
) -> dict[str, list[Group]]:
    """The groups that a sweep is read by, each best first, under what they are: its settings; if given, the values of
    the varied setting `by`; and the best settings of it and of another sweep.

    ConfigError if the metric was not loaded, or `by` was not varied.
    """
    shown = {"settings": groups(sweep, metric, mode)}
    if by:
        shown[f"by {by}"] = groups(sweep, metric, mode, by)
    if against:
        bests = ((sweep.name, shown["settings"][0]), (against.name, groups(against, metric, mode)[0]))
        shown[f"against {against.name}"] = best_first((_of_sweep(name, best) for name, best in bests), mode)
    return shown


def _of_sweep(name: str, best: Group) -> Group:
    settings: dict[str, Setting] = {"sweep": name}
    return replace(best, label=f"{name}: {best.label}", settings=settings | best.settings)


def best_settings(sweep: Sweep, found: Sequence[Group], uri: str) -> str:
    """The best setting as YAML for ppo.py, without the seed if seeds were varied; nothing if no trial has a result, or
    the config of the best is not in MLflow or of another version of rlx."""
    if not found[0].values:
        return ""
    trial = found[0].ended[0]
    try:
        config = loading.run_config(uri, trial)
    except ConfigError:
        return ""
    seed = {statistics.SEED} & set(sweep.varied)
    tree = essentials(config, without=seed, keep=set(sweep.varied) - seed)
    notes = f"# The best setting of the sweep {sweep.name}; what is not here is at its default.\n"
    notes += "# The trial changed while it ran: this is how it ended.\n" if trial.origins else ""
    return notes + (yaml.safe_dump(tree, sort_keys=False) if tree else "")


def essentials(config: RunConfig, without: Set[str] = frozenset(), keep: Set[str] = frozenset()) -> dict[str, Any]:
    """The settings that give a config again, as a tree: those of `keep`, and of the others as few as will do.

    Its name, its storage and `without` are left out.
    """
    kept = {key: value for key, value in flatten(config).items() if key not in {*_PLACE, *without}}
    wanted = from_tree(with_overrides({}, kept))
    for key in [key for key in kept if key not in keep]:  # defaults may follow other settings, so each is tried
        fewer = {other: value for other, value in kept.items() if other != key}
        try:
            if from_tree(with_overrides({}, fewer)) == wanted:
                kept = fewer
        except ConfigError:
            continue
    return with_overrides({}, kept)
