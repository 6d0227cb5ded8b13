"""One HTML page with the result of a sweep: a sentence, the options of the sweep, tables, figures, samples.

The page opens offline: it contains the JavaScript of plotly, once, and fetches nothing. Left out: the figures
(figures.py, trial_figures.py), the curves of every metric (explorer.py) and HTML (html.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from rlx.analysis import loading, progress, statistics, tables
from rlx.analysis.comparison import cost
from rlx.analysis.comparison.evidence import Evidence
from rlx.analysis.comparison.rungs import rung_text
from rlx.analysis.comparison.wording import gap_sentence, sweep_verdict
from rlx.analysis.importance import importance, varied_settings
from rlx.analysis.loading import Sweep
from rlx.analysis.page import comparison_sections, explorer, figures, trial_figures
from rlx.analysis.page.html import PageSection, render_sections
from rlx.analysis.page.trial_figures import described
from rlx.analysis.ranges import natural_range
from rlx.analysis.sentences import difference_sentence
from rlx.analysis.statistics import Group
from rlx.analysis.style import NUM_BANDS
from rlx.config.errors import ConfigError
from rlx.config.sweep import Mode
from rlx.tracking import metrics
from rlx.tracking.services import mlflow_page
from rlx.tracking.services.mlflow_errors import without_password

_SELECTION_BIAS = (
    "The best of many means looks better than it is, because it was selected: to be sure, run it again on fresh seeds."
)


def render(
    sweep: Sweep,
    compared: Mapping[str, Sequence[Group]],
    evidence: Evidence,
    recipe: str,
    uri: str,
    metric: str,
    mode: Mode,
) -> str:
    """Renders the page.

    Args:
        compared: the candidates of the sweep, best first, under "settings"; further comparisons under their titles.
        evidence: what the runs prove of them.
        recipe: the best candidate as YAML; empty if it is not known.
        uri: the tracking store with the samples.
    """
    candidates = compared["settings"]
    order = f"{'highest' if mode == 'max' else 'lowest'} first"
    facts = {
        "options": ", ".join(f"{key} {value}" for key, value in sweep.options.items()),
        "varied": ", ".join(sweep.varied) or "nothing",
        "ranked by": f"{metric}, {order}: {metrics.meaning(metric)}",
    }
    if spent := cost.cost_line(sweep):
        facts["cost"] = spent
    sections = [
        _ranking(candidates, sweep, metric),
        *comparison_sections.paired(candidates, evidence),
        *comparison_sections.races(sweep, candidates, metric, mode, loading.race_text(uri, sweep)),
        *_figures(candidates, metric, mode),
        *_any_metric(candidates, uri),
        *_best_so_far(sweep, metric, mode),
        *_stops(sweep, uri, metric, mode),
        *_varied(candidates, metric, mode),
        *(
            _comparison(title, groups, metric, evidence)
            for title, groups in compared.items()
            if groups is not candidates
        ),
        *comparison_sections.flips(evidence.against, "Flipped questions of the two sweeps"),
        *comparison_sections.flips(evidence.nearest),
        *comparison_sections.lineages(sweep, metric),
        *_samples(candidates, uri),
        *_best_candidate(sweep, candidates, recipe),
        every_trial(sweep, uri, metric, mode),
    ]
    return render_sections(f"Sweep {sweep.name}", sweep_verdict(candidates, evidence, metric), facts, sections)


# ---------------------------------------------------------------------------------------------------------------------
# Sections


def _ranking(candidates: Sequence[Group], sweep: Sweep, metric: str) -> PageSection:
    num_questions = sweep.num_questions_of(metric)
    floor = f", and at least the interval of a share of {num_questions} questions" if num_questions else ""
    note = (
        f"Settings by the mean of the last value over their runs; ± is half the 95 % interval (Student's t{floor}). "
        f"{_impossible_values(candidates, metric)}"
        "Tokens (generated) and seconds (of steps and evaluations, without the start of engines; the first step of a "
        f"process is slow) are the mean of the runs. {_SELECTION_BIAS if len(candidates) > 1 else ''}"
    )
    return PageSection("Settings, ranked", note, table=tables.group_table(candidates))


def _impossible_values(candidates: Sequence[Group], metric: str) -> str:
    """What an interval means that is wider than the range of the metric; empty if none is."""
    natural = natural_range(metric)
    reaching = [group for group in candidates if not all(natural.holds(end) for end in group.ends)]
    if not reaching:
        return ""
    fewest = min(len(group.values) for group in reaching)
    return (
        f"An interval that reaches beyond the values that {metric} can have says that {fewest} runs are too few to "
        "tell; figures draw it up to these values. "
    )


def _figures(candidates: Sequence[Group], metric: str, mode: Mode) -> list[PageSection]:
    """The means of the candidates that have values: at the end, by step, and by cost."""
    rated = [group for group in candidates if group.values]
    if not rated:
        return []
    means = (
        f"Mean over the runs of each setting, the best {NUM_BANDS} with their 95 % intervals; a run that ended early "
        "keeps its last value. Click a name to hide it."
    )
    costs = (
        "The mean of each setting over the mean cost of its runs, and over the length of their last answers. Diamonds "
        "are on the Pareto front: no other setting is as good in all four."
    )
    return [
        PageSection("Intervals", "The mean of each setting and the runs behind it.", figures.intervals(rated, metric)),
        PageSection("Learning curves", means, figures.curves(rated, metric)),
        PageSection("Cost and result", costs, figures.costs(rated, metric, mode)),
    ]


def _any_metric(candidates: Sequence[Group], uri: str) -> list[PageSection]:
    """The curves of every metric that the trials logged, also of trials that run or failed."""
    trials = explorer.shown_trials(candidates)
    data = explorer.gather_curves([loading.every_metric(uri, trial) for trial in trials])
    if not data.metrics:
        return []
    all_trials = sum(len(group.trials) for group in candidates)
    best = f" of the best {len(trials)} of {all_trials} trials" if len(trials) < all_trials else ""
    note = f"A line per trial{best}, in the color of its setting. Click a name to hide the trials of a setting."
    return [PageSection("Any metric", note, explorer.draw_first(candidates, data), explorer=data)]


def _best_so_far(sweep: Sweep, metric: str, mode: Mode) -> list[PageSection]:
    finishes = progress.best_so_far(sweep, metric, mode)
    if len(finishes) < 2:
        return []
    note = (
        "Each trial is one run, so the best of them was also lucky. If the line is flat for long, more trials of this "
        "search find little."
    )
    return [PageSection("Best so far", note, trial_figures.best_values(finishes, metric))]


def _stops(sweep: Sweep, uri: str, metric: str, mode: Mode) -> list[PageSection]:
    """The steps at which a scheduler stopped trials, and their values there."""
    rungs = progress.find_rungs(sweep, metric)
    if not rungs:
        return []
    counts = ", ".join(
        f"{rung.stopped or 'none'} of {rung.reached} at {rung_text(rung.at, sweep.rung_by)}" for rung in rungs
    )
    note = f"The scheduler stopped {counts}. A trial that was stopped might still have become better."
    figure, table = trial_figures.stops(sweep, rungs, metric), progress.rung_table(sweep, metric, mode)
    return [PageSection("Stopped early", note, figure, table=table, links=_run_pages(sweep, uri))]


def _varied(candidates: Sequence[Group], metric: str, mode: Mode) -> list[PageSection]:
    """What the result owes to each varied setting."""
    rated = [group for group in candidates if group.values]
    if not varied_settings(rated):
        return []
    drag = "A line per setting. Drag along an axis to select a range of it; click on the axis to end the selection."
    return [
        PageSection("Parallel coordinates", drag, figures.parallel_coordinates(rated, metric)),
        PageSection("Slices", "The means by one varied setting at a time.", figures.slices(rated, metric)),
        _importance(rated, mode),
    ]


def _importance(rated: Sequence[Group], mode: Mode) -> PageSection:
    title = "Importance of each setting"
    try:
        shares = importance(rated, mode)
    except ConfigError as error:
        return PageSection(title, f"Not given: {error}.")
    note = (
        "fANOVA: the share of the differences between the means that each setting explains by itself. The shares add "
        "up to 100 % even if all differences are chance: rely on them only if intervals above do not overlap."
    )
    return PageSection(title, note, figures.importances(shares))


def _comparison(title: str, groups: Sequence[Group], metric: str, evidence: Evidence) -> PageSection:
    rated, pair = [group for group in groups if group.values], evidence.against
    note = difference_sentence(*rated) if len(rated) == 2 else ""
    if pair and pair.first.label in [group.label for group in groups]:
        note = gap_sentence(pair)
    if "sweep" in groups[0].settings:
        note += " Each was selected as the best of its sweep, which makes both look better than they are."
    figure = figures.curves(rated, metric) if rated else None
    return PageSection(f"Compared {title}", note, figure, table=tables.group_table(groups))


def _samples(candidates: Sequence[Group], uri: str) -> list[PageSection]:
    """The answers of the best trial of the best candidate and the worst trial of the worst one to the same prompts."""
    title = "Samples of the best and the worst trial"
    ended = [trial for group in candidates for trial in group.ended]
    if len(ended) < 2:
        return []
    best, worst = ended[0], ended[-1]
    table = side_by_side(loading.samples(uri, best), loading.samples(uri, worst))
    if table.empty:
        return [PageSection(title, "Not given: MLflow has no prompt that both answered.")]
    texts = described([best, worst])
    note = f"Greedy answers at the last evaluation. Best: {texts[best]}. Worst: {texts[worst]}."
    return [PageSection(title, note, table=table)]


def side_by_side(best: pd.DataFrame, worst: pd.DataFrame) -> pd.DataFrame:
    """Joins the samples of two trials on the prompts that both answered.

    Returns:
        Columns prompt, answer, and completion and score of each trial.
    """
    left = best.drop_duplicates("prompt")[["prompt", "answer", "completion", "score"]]
    right = worst.drop_duplicates("prompt")[["prompt", "completion", "score"]]
    return left.merge(right, on="prompt", suffixes=(", best", ", worst"))


def without_empty_columns(table: pd.DataFrame) -> pd.DataFrame:
    """A table without the columns that have no value in any row."""
    return table.loc[:, (table.notna() & (table != "")).any()]


def _best_candidate(sweep: Sweep, candidates: Sequence[Group], recipe: str) -> list[PageSection]:
    title = "The best setting"
    if not candidates[0].is_compared:
        return []
    if not recipe:
        return [PageSection(title, "Not given: its config.yaml is not in MLflow, or is of another version of rlx.")]
    seed = " --seed 100" if statistics.SEED in sweep.varied else ""
    note = f"This is best.yaml, beside this page. To run it: rlx train --config best.yaml{seed}"
    return [PageSection(title, note, text=recipe)]


def every_trial(sweep: Sweep, uri: str, metric: str, mode: Mode) -> PageSection:
    """A row per trial, whose name leads to its run in MLflow."""
    address, links = mlflow_page.server(without_password(uri)), _run_pages(sweep, uri)
    table = without_empty_columns(tables.trial_table(sweep, metric, mode))
    order = "Best last value first; interrupted and failed trials are last."
    note = f"{order} A name leads to the run of the trial in MLflow, at {address}"
    if mlflow_page.has_server(uri):
        return PageSection("Every trial", f"{note}.", table=table, links=links)
    note += " while the command below the table runs; at another address, the path follows that one."
    path = mlflow_page.run_path(sweep.experiment_id, "RUN")
    command = f"{without_password(mlflow_page.browse_command(uri))}\n# the path of a run: {path}"
    return PageSection("Every trial", note, table=table, links=links, text=command)


def _run_pages(sweep: Sweep, uri: str) -> dict[str, str]:
    """The web address of each trial in MLflow, by its name."""
    address = mlflow_page.server(without_password(uri))
    paths = {trial.name: mlflow_page.run_path(sweep.experiment_id, trial.run_ids[0]) for trial in sweep.trials}
    return {name: address + path for name, path in paths.items()}
