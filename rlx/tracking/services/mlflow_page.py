"""MLflow's page of a run: its address, and what it shows beside curves: description, data sets, best evaluation.

Its "System metrics" show rank 0's machine, as MLflow's own monitors measure it. (Ray's dashboard and its Prometheus
endpoint show all nodes.) Left out: records and how they reach MLflow (mlflow.py, delivery.py).
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlx.config.run import RunConfig, storage_words
from rlx.config.sections.base import flatten
from rlx.config.sections.data import SourceConfig
from rlx.tracking.parameters import params_of

BEST = "best/"
"""the prefix of a metric that a table of runs can be sorted by: the best value of another one"""
SYSTEM = "system/"
"""the prefix of what MLflow shows as a system metric"""
_INTERVAL_S = 5.0  # between measurements of the machine
_LOG = logging.getLogger("rlx")
PAUSED = "rlx.paused_ms"
"""the tag that says for how long a run has waited to be resumed, in all; its end is shown so much earlier"""
CHANGED = "rlx.changed"
"""the tag of a run that goes on with other settings: those that differ from its params, as they are now"""
_UNSET = "rlx.unset"
"""the tag of a run that began without a value for settings that have one by default: their names"""
_DIGEST = "rlx.description"
"""the tag with a digest of the description that rlx gave a run last, by which it knows its own"""
LONGEST_PARAM = 6000
"""characters; MLflow refuses longer values of parameters"""
_LONGEST_TAG = 5000  # characters, as much as MLflow's databases take
_DESCRIPTION = "mlflow.note.content"
_DATA_SETS = {"training": "data.", "evaluation": "eval."}
"""by MLflow's word for what a data set is used for: the settings that make it"""
_OF_ONE_SOURCE, _PARAMS = "data.source", "data.params"
"""how the settings begin that say nothing of data.sources; and those that some of them take"""
_MOST_NAMED = 2000  # characters of a description in which sources are named; MLflow takes no tags of more than 8000
_RUN_PATH = re.compile(r"(?:^|/)((?:sweeps/[^/]+/)?runs/([^/]+))$")
"""the path of a run's folder below its storage, and the name of the folder"""
_DEFAULT_SERVER = "http://127.0.0.1:5000"  # where `mlflow ui` answers
_TRAINING_VIEW = "?workflowType=machine_learning"  # without it, MLflow 3 opens its pages for traces and evaluations


def has_server(uri: str) -> bool:
    """Whether a tracking address is that of a server; otherwise it is a database, which `browse_command` serves."""
    return uri.startswith(("http://", "https://"))


def server(uri: str) -> str:
    """The web address at which a tracking store is seen, once it is served."""
    return uri.rstrip("/") if has_server(uri) else _DEFAULT_SERVER


def browse_command(uri: str) -> str:
    """What to type in a shell to see a tracking store in a browser."""
    return f"{'open' if has_server(uri) else 'mlflow ui --backend-store-uri'} {shlex.quote(uri)}"


def way_back(uri: str, experiment: Any) -> str:
    """A message that an experiment is deleted, with the command that restores it; empty if it is not, or is None."""
    if experiment is None or experiment.lifecycle_stage == "active":
        return ""
    command = f"MLFLOW_TRACKING_URI={shlex.quote(uri)} mlflow experiments restore -x {experiment.experiment_id}"
    return f"{experiment.name!r} is deleted: `{command}` restores it"


def way_back_of(uri: str, client: Any, kind: str, its_id: str) -> str:
    """The same of a deleted run or experiment by its id. With an experiment, MLflow deletes and restores its runs."""
    command = f"MLFLOW_TRACKING_URI={shlex.quote(uri)} mlflow runs restore --run-id {its_id}"
    with suppress(Exception):  # the error type depends on the kind of store
        experiment = client.get_experiment(client.get_run(its_id).info.experiment_id if kind == "run" else its_id)
        if way := way_back(uri, experiment):
            return f"experiment {way}"
    if kind == "experiment":
        return f"experiment {its_id} is deleted"
    return f"run {its_id} is deleted: `{command}` restores it; without its outbox a resume begins a new one"


def run_path(experiment_id: str, run_id: str) -> str:
    """What follows the address of the server in that of a run's page."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}{_TRAINING_VIEW}"


def set_description(client: Any, run_id: str, text: str) -> None:
    """Gives a run the description that its page shows."""
    client.set_tag(run_id, _DESCRIPTION, text)


def summarize(client: Any, run_id: str, description: str, metrics: Mapping[str, float]) -> None:
    """Gives a sweep a description, and the best values of metrics under names of their own."""
    set_description(client, run_id, description)
    for name, value in metrics.items():
        client.log_metric(run_id, f"{BEST}{name}", value, step=0)


def dress(client: Any, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    """Gives a new run a description and its data sets; a sweep gets them when it is over.

    Args:
        params: its settings by dotted name.
    """
    if not (text := _description(params, tags)):
        return
    unset = ", ".join(sorted(_defaults().keys() - params.keys()))
    _set_tags(client, run_id, _described(text) | ({_UNSET: unset[:_LONGEST_TAG]} if unset else {}))
    sources = _sources(params)
    uses = [(use, prefix, source) for use, prefix in _DATA_SETS.items() for source in sources or (None,)]
    client.log_inputs(run_id, [_data_set(params, *use) for use in uses])


def tell_changes(client: Any, run: Any, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    """Gives a run that goes on with other settings their description, and a tag with those that differ from its params.

    MLflow's params cannot change: they are those of the first start. A description in which a person has changed a
    character stays as it is, and so does that of a run which an earlier version began.
    """
    changed = _changed(run.data, params)
    if not changed and CHANGED not in run.data.tags:
        return
    new, present = {CHANGED: ", ".join(changed)[:_LONGEST_TAG]}, run.data.tags.get(_DESCRIPTION, "")
    if (text := _description(params, tags)) and _described(present)[_DIGEST] == run.data.tags.get(_DIGEST):
        new |= _described(text)
    _set_tags(client, run.info.run_id, new)


def _described(text: str) -> dict[str, str]:
    """The tags of a run with a description of rlx."""
    return {_DESCRIPTION: text, _DIGEST: hashlib.sha256(text.encode()).hexdigest()[:8]}


def _set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Sets all tags in one request."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _defaults() -> dict[str, str]:
    """The settings that have a value by default, as params."""
    return {key: str(value) for key, value in params_of(flatten(RunConfig())).items()}


def _changed(data: Any, params: Mapping[str, str]) -> list[str]:
    """The settings that differ from a run's params, each with its value now; a sweep that goes on has given none.

    What has no param was unset, or is newer than the run, which was made with its default then.

    Args:
        data: of the run, from MLflow.
    """
    unset = data.tags.get(_UNSET, "").split(", ")
    known = {key: value for key, value in _defaults().items() if key not in unset}
    before = known | {"train.shuffle_minibatches": "False"} | dict(data.params)  # as runs older than it go on
    changed = [f"{key} {value}" for key, value in params.items() if before.get(key) != value[:LONGEST_PARAM]]
    settings = flatten(RunConfig())
    return changed + [f"{key} unset" for key in data.params if params and key in settings and key not in params]


def _description(params: Mapping[str, str], tags: Mapping[str, str]) -> str:
    """What a run is, and how to read what it keeps; empty for a sweep, or a record of an earlier version."""
    if tags.get("rlx.kind") != "run" or "data.source" not in params:
        return ""
    named = ", ".join(f"{each.label} ({each.source})" for each in _sources(params)) or params["data.source"]
    size = f"{params['train.steps']} steps of {params['train.prompts_per_step']} prompts"
    what = f"PPO ({params['algorithm.advantage']}) of {params['model.path']} on {named[:_MOST_NAMED]}: {size}"
    text = f"{what} x {params['train.samples_per_prompt']} completions. Kept in {tags['rlx.folder']}."
    return text + _how_to_read(params, tags["rlx.folder"])


def _how_to_read(params: Mapping[str, str], folder: str) -> str:
    """The commands that show the completions of a run, and the page that it leaves; empty if it keeps none."""
    if float(params.get("tracking.completions", "0")) == 0 or not (found := _RUN_PATH.search(folder)):
        return ""
    storage, path, name = params["storage"], found[1], found[2]
    words = [name, *storage_words(storage)]
    if path != f"runs/{name}":  # a trial is not found by its name alone
        words = [run_address(folder, storage)]
    to_read = ["rlx", "samples", *words]
    to_write = [*to_read, "--html", f"{name}.html"]
    some = "Some of them are in its artifact completions.html when it has ended."
    return f" Its completions: `{shlex.join(to_read)}`; as a page: `{shlex.join(to_write)}`. {some}"


def run_address(folder: str, storage: str) -> str:
    """The address of a run's folder, of which a record has the path and the address of its storage."""
    if "://" not in storage or not (found := _RUN_PATH.search(folder)):
        return folder
    place, mark, options = storage.partition("?")
    return f"{place.rstrip('/')}/{found[1]}{mark}{options}"


def _sources(params: Mapping[str, str]) -> Sequence[SourceConfig]:
    """The `data.sources` of a run; none also if an earlier version recorded them, in another form."""
    try:
        return [SourceConfig.model_validate(each) for each in ast.literal_eval(params.get("data.sources", "()"))]
    except (ValueError, SyntaxError, TypeError):
        return ()


def _data_set(params: Mapping[str, str], use: str, prefix: str, source: SourceConfig | None) -> Any:
    """Prompts as MLflow's data set; its digest is that of the settings that make them.

    Args:
        source: which of data.sources; None: data.source.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    settings = {key: value for key, value in params.items() if key.startswith(("data.", prefix))}
    name = (params.get(f"{prefix}source") or params["data.source"])[-500:]
    if source:
        left_out = (_OF_ONE_SOURCE,) if source.takes_params else (_OF_ONE_SOURCE, _PARAMS)
        common = {key: value for key, value in settings.items() if not key.startswith(left_out)}
        own = source.model_dump(mode="json", exclude_none=True, exclude={"name", "weight"})
        settings = common | {f"data.{key}": str(value) for key, value in own.items()}
        address = source.held_out if prefix == _DATA_SETS["evaluation"] and source.held_out else source.source
        name = f"{source.label} ({address[-400:]})"
    text = json.dumps(settings, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    data_set = Dataset(name=name, digest=digest, source_type="rlx", source=text)
    return DatasetInput(data_set, [InputTag("mlflow.data.context", use)])


def log_best(client: Any, run_id: str, at: int) -> None:
    """Logs the best value of a run's `checkpoint.best_by` after any step of training.

    Args:
        at: time in ms since the epoch.
    """
    from mlflow.entities import Metric

    params = client.get_run(run_id).data.params
    name, sign = params.get("checkpoint.best_by"), -1 if params.get("checkpoint.best_mode") == "min" else 1
    history = client.get_metric_history(run_id, name) if name else []
    # Of a step that was done again with other settings, the last value is the run's.
    points = {point.step: point for point in sorted(history, key=lambda point: point.timestamp) if point.step > 0}
    if points:
        best = max(points.values(), key=lambda point: (sign * point.value, -point.step))
        client.log_batch(run_id, metrics=[Metric(f"{BEST}{name}", best.value, at, best.step)])


def paused_ms(run: Any, reopened_at: int | None = None) -> int:
    """The milliseconds for which a run has waited to be resumed, in all.

    MLflow shows the time from a run's start to its end as its duration, and the start cannot change. So pauses are
    taken off the end.

    Args:
        reopened_at: time in ms at which it goes on now; None: it does not.
    """
    known = int(run.data.tags.get(PAUSED, "0"))
    if reopened_at is None:
        return known
    signs = [run.info.start_time, *(metric.timestamp for metric in run.data.to_proto().metrics)]
    if run.info.end_time:  # otherwise it was killed
        signs.append(run.info.end_time + known)
    return known + max(0, reopened_at - max(signs))


# ---------------------------------------------------------------------------------------------------------------------
# The machine


class SystemMetrics:
    """Measures in a thread until it is closed, because a GPU that is idle between two steps is busy within them."""

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s, self._lock, self._ended = interval_s, threading.Lock(), threading.Event()
        self._monitors: list[Any] = []
        self._thread = threading.Thread(target=self._watch, daemon=True, name="system-metrics")
        self._thread.start()

    def take(self) -> dict[str, float]:
        """The means since the last call, by MLflow's names; empty until the monitors are there."""
        with self._lock:
            self._collect()
            means = {name: value for monitor in self._monitors for name, value in monitor.aggregate_metrics().items()}
            for monitor in self._monitors:
                monitor.clear_metrics()
        return {f"{SYSTEM}{name}": float(value) for name, value in means.items()}

    def close(self) -> None:
        """Ends the thread, and waits a second for it at most: it may be importing MLflow."""
        self._ended.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        monitors = _monitors()  # imports MLflow, which takes seconds
        with self._lock:
            self._monitors = monitors
        while not self._ended.wait(self._interval_s):
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        for monitor in list(self._monitors):
            try:
                monitor.collect_metrics()
            except Exception as error:  # what a driver or a container refuses is no reason to end a run
                _LOG.warning("no more system metrics from %s: %s", type(monitor).__name__, error)
                self._monitors.remove(monitor)


def _monitors() -> list[Any]:
    """MLflow's monitors that work on this machine."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = []
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        try:
            monitors.append(kind())
        except Exception as error:  # it has no GPU, or no library that asks it
            logging.getLogger(__name__).debug("%s: %s", kind.__name__, error)
    return monitors
