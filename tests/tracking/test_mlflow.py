"""MLflow itself: registering models, refusing addresses without a server, reading runs back as records."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

import rlx
from rlx.config.errors import ConfigError
from rlx.config.sections.base import flatten
from rlx.replay import recorded
from rlx.samples import last_page
from rlx.tracking.base import MetricPoint, RunStatus
from rlx.tracking.metrics import meaning
from rlx.tracking.services import mlflow, mlflow_page


@pytest.fixture
def uri(tmp_path: Path, empty_database: Path) -> str:
    (folder := tmp_path / "store").mkdir()
    shutil.copy(empty_database, folder)
    return mlflow.default_uri(folder)


def test_a_model_is_stored_with_its_run_and_registered_under_the_next_version(uri: str, tmp_path: Path) -> None:
    now = int(time.time() * 1000)
    run_id = mlflow.MLflowService(uri).make_run("a key", "rlx", "run", parent=None, params={}, tags={}, at=now)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert [mlflow.register(uri, run_id, folder, "sums") for _ in range(2)] == ["1", "2"]
    client = mlflow.client(uri)
    version = client.get_model_version("sums", "2")
    assert version.run_id == run_id and version.source.endswith("/artifacts/model")
    assert mlflow.artifact_names(uri, run_id, "model") == ["model/config.json"]


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:9/artifacts", "file://{}/victim", "file://{}/store/mlartifacts/../../victim"]
)
def test_a_database_that_names_another_place_for_files_is_not_followed(place: str, uri: str, tmp_path: Path) -> None:
    """The address would get the user's key for MLflow, and the folder files of ours."""
    client = mlflow.client(uri)
    experiment = client.create_experiment("rlx", place.format(tmp_path))
    run_id = client.create_run(experiment).info.run_id
    (file := tmp_path / "file.txt").write_text("text")
    writer = mlflow.MLflowService(uri).writer(run_id)
    writer.log_text("config.yaml", "text")
    writer.log_samples([{"prompt": "a"}], 1)
    writer.log({"loss": 1.0}, 1, 0)
    mlflow.log_files(uri, run_id, [file])
    assert mlflow.artifact_names(uri, run_id) == []
    for refused in (
        lambda: mlflow.read_artifact(uri, run_id, "a"),
        lambda: mlflow.register(uri, run_id, tmp_path, "m"),
    ):
        with pytest.raises(ConfigError, match=r"its database says that the files of run .* lie elsewhere"):
            refused()
    assert not (tmp_path / "victim").exists() and mlflow.get_run(uri, run_id).metrics == {"loss": 1.0}


def test_runs_are_read_back_as_records(uri: str) -> None:
    service = mlflow.MLflowService(uri)
    parent = service.make_run("1", "rlx", "sweep", parent=None, params={}, tags={"rlx.kind": "sweep"}, at=1000)
    child = service.make_run(
        "2", "rlx", "trial", parent=parent, params={"a.b": "0.5"}, tags={"rlx.kind": "run"}, at=2000
    )
    later = service.make_run("3", "rlx", "trial_2", parent=parent, params={}, tags={"rlx.kind": "run"}, at=3000)
    writer = service.writer(child)
    writer.log({"reward/mean": 0.25}, 0, 2100)
    writer.log({"reward/mean": 0.5}, 1, 2200)
    writer.log_text("config.yaml", "seed: ü\n")
    writer.end(RunStatus.FAILED, 2300)
    experiment = mlflow.find_experiment(uri, "rlx")
    run = mlflow.get_run(uri, child)
    assert (run.id, run.name, run.experiment_id, run.parent_id) == (child, "trial", experiment, parent)
    assert (run.status, run.start_ms, run.end_ms) == (RunStatus.FAILED, 2000, 2300)
    assert (run.params, run.tags["rlx.kind"], run.metrics) == ({"a.b": "0.5"}, "run", {"reward/mean": 0.5})
    assert mlflow.history(uri, child, "reward/mean") == [MetricPoint(0, 0.25, 2100), MetricPoint(1, 0.5, 2200)]
    assert mlflow.read_artifact(uri, child, "config.yaml") == "seed: ü\n"
    assert [found.id for found in mlflow.find_runs(uri, experiment, parent=parent)] == [child, later]
    assert [found.id for found in mlflow.find_runs(uri, experiment, kind="sweep")] == [parent]
    assert mlflow.find_runs(uri, experiment, kind="sweep", parent=parent) == []
    mlflow.log_summary(uri, parent, "it won", {"eval/accuracy": 0.75})
    summary = mlflow.get_run(uri, parent)
    assert (summary.tags["mlflow.note.content"], summary.metrics) == ("it won", {"best/eval/accuracy": 0.75})


def test_a_step_that_is_done_again_with_other_settings_gets_the_new_values(uri: str) -> None:
    service = mlflow.MLflowService(uri)
    run_id = service.make_run("1", "rlx", "a", parent=None, params=SETTINGS, tags={}, at=1000)
    for at, again, values in ((2000, False, (0.5, 0.9)), (3000, True, (0.7,)), (4000, False, (0.1, 0.1, 0.6))):
        writer = service.writer(run_id)
        for step, value in enumerate(values, start=1):
            options = {"again": True} if again else {}
            writer.log_samples([{"prompt": str(at)}], step, **options)
            writer.log({"eval/accuracy": value}, step, at + step, **options)
    assert recorded.metrics_of(uri, run_id) == {
        each: {"eval/accuracy": v} for each, v in ((1, 0.7), (2, 0.9), (3, 0.6))
    }
    assert "3000" in mlflow.read_artifact(uri, run_id, "samples/step_000001.json")
    writer.log({"eval/accuracy": 0.2}, 2, 5000, again=True)
    writer.end(RunStatus.FINISHED, 6000)
    assert mlflow.get_run(uri, run_id).metrics["best/eval/accuracy"] == 0.7


SETTINGS = {key: str(value) for key, value in flatten(rlx.RunConfig()).items() if value is not None}


def test_the_page_of_a_run_has_a_description_its_data_sets_and_its_best(uri: str) -> None:
    service = mlflow.MLflowService(uri)
    tags = {"rlx.kind": "run", "rlx.folder": "/runs/a"}
    run_id = service.make_run("1", "rlx", "a", parent=None, params=SETTINGS, tags=tags, at=1000)
    writer = service.writer(run_id)
    for step, value in enumerate((0.9, 0.25, 0.75, 0.75, 0.5)):
        writer.log({"eval/accuracy": value}, step, 2000 + step)
    for status in (RunStatus.KILLED, RunStatus.FINISHED, RunStatus.FINISHED):
        assert "best/eval/accuracy" not in mlflow.get_run(uri, run_id).metrics or status == RunStatus.FINISHED
        writer.end(status, 3000)
    run = mlflow.client(uri).get_run(run_id)
    assert run.data.tags["mlflow.note.content"] == (
        "PPO (gae) of tiny on reasoning_gym:chain_sum: 40 steps of 64 prompts x 4 completions. Kept in /runs/a. "
        "Its completions: `rlx samples a`; as a page: `rlx samples a --html a.html`. "
        "Some of them are in its artifact completions.html when it has ended."
    )
    sets = {used.tags[0].value: used.dataset for used in run.inputs.dataset_inputs}
    assert {use: each.name for use, each in sets.items()} == dict.fromkeys(
        ("training", "evaluation"), "reasoning_gym:chain_sum"
    )
    assert sets["training"].digest != sets["evaluation"].digest and "data.num_prompts" in sets["training"].source
    assert mlflow.history(uri, run_id, "best/eval/accuracy") == [MetricPoint(2, 0.75, 3000)]  # of trained steps


@pytest.mark.parametrize(
    ("folder", "storage", "words"),
    [
        ("/my runs/runs/a", "/my runs", "a --storage '/my runs'"),
        ("bucket/x/runs/a", "s3://bucket/x?region=eu", "a --storage 's3://bucket/x?region=eu'"),
        ("/s/sweeps/b/runs/t_1", "/s", "/s/sweeps/b/runs/t_1"),
        ("bucket/sweeps/b/runs/t_1", "s3://bucket", "s3://bucket/sweeps/b/runs/t_1"),
    ],
)
def test_the_description_says_how_to_read_the_completions(uri: str, folder: str, storage: str, words: str) -> None:
    name = folder.rpartition("/")[2]
    told = f"`rlx samples {words}`; as a page: `rlx samples {words} --html {name}.html`. Some of them are "
    told += f"in its artifact {last_page.FILE} when it has ended."
    assert note_of(uri, {"storage": storage}, folder).endswith(f" Kept in {folder}. Its completions: {told}")
    assert note_of(uri, {"storage": storage, "tracking.completions": "0.0"}, folder).endswith(f" Kept in {folder}.")


def note_of(uri: str, changes: dict[str, str], folder: str = "/s/runs/a") -> str:
    """The description of a new run."""
    service, tags = mlflow.MLflowService(uri), {"rlx.kind": "run", "rlx.folder": folder}
    run_id = service.make_run(uuid.uuid4().hex, "rlx", "a", parent=None, params=SETTINGS | changes, tags=tags, at=1)
    return mlflow.get_run(uri, run_id).tags["mlflow.note.content"]


FOLDER_TAGS = {"rlx.kind": "run", "rlx.folder": "/s/runs/a"}


@pytest.mark.parametrize("note", ["lr too high", "{own} lr too high", "{begin} (Anna's baseline){end}", "", None])
def test_a_resume_keeps_the_note_that_a_person_has_written(uri: str, note: str | None) -> None:
    service = mlflow.MLflowService(uri)
    run_id = service.make_run("1", "rlx", "a", parent=None, params=SETTINGS, tags=FOLDER_TAGS, at=1)
    own = mlflow.get_run(uri, run_id).tags["mlflow.note.content"]
    parts = {"own": own, "begin": own[:9], "end": own[9:]}
    if note is not None:
        mlflow.client(uri).set_tag(run_id, "mlflow.note.content", note.format(**parts))
    for at, steps in ((2, 50), (3, 60)):
        service.reopen_run(run_id, at, SETTINGS | {"train.steps": str(steps)}, FOLDER_TAGS)
        wanted = own.replace("40 steps", f"{steps} steps") if note is None else note.format(**parts)
        assert mlflow.get_run(uri, run_id).tags["mlflow.note.content"] == wanted


def test_settings_that_become_set_or_unset_are_changed(uri: str) -> None:
    service = mlflow.MLflowService(uri)
    of_before = {key: value for key, value in SETTINGS.items() if key != "seed"}  # a setting that was not there
    of_before |= {"algorithm.target_kl": "0.05", "old.setting": "1"}
    run_id = service.make_run("1", "rlx", "a", parent=None, params=of_before, tags=FOLDER_TAGS, at=1)
    assert mlflow.get_run(uri, run_id).tags["rlx.unset"] == "seed"
    mlflow.client(uri).delete_tag(run_id, "rlx.unset")  # which earlier versions did not set
    for at, now, changed in (
        (2, SETTINGS | {"algorithm.target_kl": "0.05"}, None),
        (3, SETTINGS | {"algorithm.dual_clip": "3.0"}, "algorithm.dual_clip 3.0, algorithm.target_kl unset"),
        (4, SETTINGS | {"seed": "7", "algorithm.target_kl": "0.05"}, "seed 7"),
        (5, {}, ""),
    ):
        service.reopen_run(run_id, at, now, FOLDER_TAGS)
        assert mlflow.get_run(uri, run_id).tags.get("rlx.changed") == changed


def test_a_setting_that_had_no_value_and_gets_its_default_is_changed(uri: str) -> None:
    service, key = mlflow.MLflowService(uri), "checkpoint.keep_last"
    unset = {name: value for name, value in SETTINGS.items() if name != key}
    run_id = service.make_run("1", "rlx", "a", parent=None, params=unset, tags=FOLDER_TAGS, at=1)
    for at, now, changed in ((2, unset, None), (3, SETTINGS, f"{key} {SETTINGS[key]}"), (4, unset, "")):
        service.reopen_run(run_id, at, now, FOLDER_TAGS)
        assert mlflow.get_run(uri, run_id).tags.get("rlx.changed") == changed


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "file:///old/my%20runs",
            "in /old/my runs, not beside its database, as after the storage was moved or copied;",
        ),
        ("mlflow-artifacts:/1", "in mlflow-artifacts:/1, not beside its database;"),
        ("s3://key:secret@bucket/x", "in s3://bucket/x, not beside its database;"),
    ],
)
def test_a_run_whose_files_lie_elsewhere_names_the_place(uri: str, place: str, told: str) -> None:
    mlflow.client(uri).create_experiment("rlx", place)
    service = mlflow.MLflowService(uri)
    run_id = service.make_run("1", "rlx", "a", parent=None, params={}, tags={}, at=1)
    assert told in service.writer(run_id).missing()


SUMS = {"source": "reasoning_gym:chain_sum", "name": "sums", "params": {"max_digits": 2}, "weight": 2.0}
WORDS = {"source": "/p/words.jsonl", "held_out": "/p/more.jsonl", "weight": 1.0}


def test_each_of_several_sources_is_named_and_a_data_set(uri: str) -> None:
    tags = {"rlx.kind": "run", "rlx.folder": "/s/runs/a"}
    several = SETTINGS | {"data.sources": str([SUMS, WORDS])}
    run_id = mlflow.MLflowService(uri).make_run("1", "rlx", "a", parent=None, params=several, tags=tags, at=1000)
    run = mlflow.client(uri).get_run(run_id)
    named = "on sums (reasoning_gym:chain_sum), words (/p/words.jsonl): 40 steps"
    assert named in run.data.tags["mlflow.note.content"]
    used = [
        (each.tags[0].value, each.dataset.name, json.loads(each.dataset.source)) for each in run.inputs.dataset_inputs
    ]
    assert sorted(each[:2] for each in used) == [
        ("evaluation", "sums (reasoning_gym:chain_sum)"),
        ("evaluation", "words (/p/more.jsonl)"),
        ("training", "sums (reasoning_gym:chain_sum)"),
        ("training", "words (/p/words.jsonl)"),
    ]
    assert {each["data.source"] for _, _, each in used} == {SUMS["source"], WORDS["source"]}
    assert not any("data.sources" in each or "data.params.max_terms" in each for _, _, each in used)
    assert len({each.dataset.digest for each in run.inputs.dataset_inputs}) == 4
    plain = SETTINGS | {"data.sources": str([SUMS | {"params": None}]), "data.params": "{'max_terms': 9}"}
    run_id = mlflow.MLflowService(uri).make_run("2", "rlx", "b", parent=None, params=plain, tags=tags, at=1000)
    of_all = json.loads(mlflow.client(uri).get_run(run_id).inputs.dataset_inputs[0].dataset.source)
    assert of_all["data.params"] == "{'max_terms': 9}"
    earlier = {"data.sources": "(SourceConfig(source='x'),)"}  # as it was recorded before
    assert " on reasoning_gym:chain_sum: " in note_of(uri, earlier)
    many = [{"source": f"/{'long/' * 40}{number}.jsonl"} for number in range(100)]
    assert note_of(uri, {"data.sources": str(many)}).endswith("has ended.")  # MLflow refuses longer ones


def test_the_duration_leaves_out_the_pauses_before_a_resume(uri: str) -> None:
    """It trains from 1.0 to 3.0 s and is ended, from 10.0 to 14.5 s and is killed, and from 20.0 to 21.0 s: 7.5 s."""
    service = mlflow.MLflowService(uri)
    run_id = service.make_run("1", "rlx", "a", parent=None, params={}, tags={"rlx.kind": "run"}, at=1000)
    service.writer(run_id).log({"reward/mean": 0.5}, 1, 2500)
    service.writer(run_id).end(RunStatus.KILLED, 3000)
    for _ in range(2):  # a repeated request changes nothing
        service.reopen_run(run_id, 10_000, {}, {})
    service.writer(run_id).log({"reward/mean": 0.5}, 2, 14_500)
    service.reopen_run(run_id, 20_000, {}, {})
    service.writer(run_id).end(RunStatus.FINISHED, 21_000)
    run = mlflow.get_run(uri, run_id)
    assert (run.tags["rlx.paused_ms"], run.tags["rlx.attempt"]) == (str(7000 + 5500), "3")
    assert (run.start_ms, run.end_ms) == (1000, 1000 + 7500)


@pytest.mark.parametrize("first", [RunStatus.FINISHED, RunStatus.KILLED])
def test_a_run_that_has_finished_was_not_killed(first: RunStatus, uri: str) -> None:
    """The driver of a sweep and the process of a trial that it stops both end its run, in either order."""
    service, params = mlflow.MLflowService(uri), {"checkpoint.best_by": "eval/accuracy"}
    run_id = service.make_run("1", "rlx", "a", parent=None, params=params, tags={"rlx.kind": "run"}, at=1000)
    service.writer(run_id).end(first, 2000)
    service.writer(run_id).log({"eval/accuracy": 0.5}, 4, 2500)  # the process has sent it late
    service.writer(run_id).end(RunStatus.KILLED if first == RunStatus.FINISHED else RunStatus.FINISHED, 3000)
    run = mlflow.get_run(uri, run_id)
    assert (run.status, run.end_ms, run.metrics["best/eval/accuracy"]) == (RunStatus.FINISHED, 3000, 0.5)


def test_the_machine_is_measured_by_mlflows_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = mlflow_page.SystemMetrics(interval_s=0.05)
    until = time.monotonic() + 60
    while not (first := machine.take()) and time.monotonic() < until:
        time.sleep(0.05)
    assert {"system/cpu_utilization_percentage", "system/disk_available_megabytes"} <= first.keys()
    assert all(meaning(name) for name in first)
    assert abs(first["system/system_memory_usage_percentage"] - psutil.virtual_memory().percent) < 30
    used = iter([10.0, 20.0, 60.0])
    monkeypatch.setattr("psutil.cpu_percent", lambda: next(used, 30.0))
    machine.take()
    until = time.monotonic() + 60
    while next(used, None) and time.monotonic() < until:
        time.sleep(0.05)
    machine.take()
    assert machine.take()["system/cpu_utilization_percentage"] == 30.0  # only what came after the last call
    machine.close()


def test_a_closed_monitor_measures_no_more() -> None:
    machine = mlflow_page.SystemMetrics(interval_s=0.01)
    machine.close()
    machine._thread.join(60)
    assert not machine._thread.is_alive()


def test_a_monitor_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(path: str) -> None:
        raise PermissionError("no disk")

    monkeypatch.setattr("psutil.disk_usage", refuse)
    machine = mlflow_page.SystemMetrics(interval_s=60)
    until = time.monotonic() + 60
    while not (measured := machine.take()) and time.monotonic() < until:
        time.sleep(0.05)
    machine.close()
    assert "system/cpu_utilization_percentage" in measured and "system/disk_usage_percentage" not in measured
    assert caplog.text.count("no more system metrics from DiskMonitor: no disk") == 1


@pytest.mark.parametrize("name", ["feature%2Flogin", "a%20b", "st?x", "50% of it", "my runs"])
def test_a_store_lies_in_its_folder_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    uri = mlflow.default_uri(folder)
    run_id = mlflow.MLflowService(uri).make_run("key", "e", "r", parent=None, params={}, tags={}, at=0)
    mlflow.MLflowService(uri).writer(run_id).log_text("config.yaml", "seed: 1")
    assert sorted(path.name for path in folder.iterdir()) == ["mlartifacts", "mlflow.db", "mlflow.db.lock"]
    assert mlflow.read_artifact(uri, run_id, "config.yaml") == "seed: 1"
    assert mlflow.find_experiment(uri, "e")
    with pytest.raises(ConfigError, match=re.escape(f"no MLflow database {folder}2/mlflow.db")):
        mlflow.find_experiment(mlflow.default_uri(tmp_path / f"{name}2"), "e")


def test_what_is_printed_can_be_pasted_into_a_shell() -> None:
    place = "sqlite:////home/me/my runs/mlflow.db"
    assert shlex.split(mlflow.MLflowService(place).browse_command()) == ["mlflow", "ui", "--backend-store-uri", place]
    assert mlflow.MLflowService("http://h:5000").browse_command() == "open http://h:5000"


def test_a_run_says_which_code_made_it(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is the working folder's, for that has the user's experiment."""

    def tags() -> dict[str, str]:
        run_id = mlflow.MLflowService(uri).make_run(str(Path.cwd()), "e", "r", parent=None, params={}, tags={}, at=0)
        return dict(mlflow.client(uri).get_run(run_id).data.tags)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tags()["rlx.version"] == rlx.__version__ and "mlflow.source.git.commit" not in tags()
    work = tmp_path / "work"
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", "-C", str(work)]
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(work)
    assert tags()["mlflow.source.git.commit"] == commit


def test_a_run_opens_among_those_of_model_training(uri: str) -> None:
    service = mlflow.MLflowService(uri)
    run_id = service.make_run("key", "e", "r", parent=None, params={}, tags={}, at=0)
    page = service.run_page(run_id)
    assert page.startswith("http://127.0.0.1:5000/#/experiments/")
    assert page.endswith(f"/runs/{run_id}?workflowType=machine_learning")
    assert service.run_page("no such run") == "http://127.0.0.1:5000"


def test_a_server_that_is_not_there_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError) as error:
        mlflow.MLflowService("http://user:secret@127.0.0.1:9").check("rlx")
    assert str(error.value) == "tracking.uri http://127.0.0.1:9: connection refused"
    with pytest.raises(ConfigError, match=r"^tracking store http://127\.0\.0\.1:9: connection refused$"):
        mlflow.find_experiment("http://user:secret@127.0.0.1:9", "e")


def test_a_deleted_experiment_is_refused_before_a_run_starts(uri: str) -> None:
    """MLflow gives its id, and then takes no runs of it."""
    service, client = mlflow.MLflowService(uri), mlflow.client(uri)
    service.check("mine")  # a run makes it
    experiment = client.create_experiment("mine")
    service.check("mine")
    client.delete_experiment(experiment)
    told = f"'mine' is deleted: `MLFLOW_TRACKING_URI={uri} mlflow experiments restore -x {experiment}` restores it"
    with pytest.raises(ConfigError) as error:
        service.check("mine")
    assert str(error.value) == f"tracking.experiment {told}, --tracking.experiment NAME takes another"
    with pytest.raises(ConfigError) as error:
        mlflow.find_experiment(uri, "mine")
    assert str(error.value) == f"experiment {told}"
    client.restore_experiment(experiment)
    service.check("mine")


def test_an_experiment_is_found_among_more_than_one_page(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow lists a thousand at a time."""
    client = mlflow.client(uri)
    experiment = client.create_experiment("rlx")
    client.create_experiment("newer")
    first_page = client.search_experiments(max_results=1)
    monkeypatch.setattr(type(client), "search_experiments", lambda self: first_page)
    assert mlflow.find_experiment(uri, "rlx") == experiment
    with pytest.raises(ConfigError, match=r"^no experiment 'newr' in sqlite:.*; nearest: newer$"):
        mlflow.find_experiment(uri, "newr")


FIRST_USER = """
import sys
from pathlib import Path
from rlx.tracking.services import mlflow

service = mlflow.MLflowService(mlflow.default_uri(Path(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
service.check("rlx")
for i in range(5):
    service.make_run(f"{sys.argv[2]}-{i}", f"experiment {i}", "a run", parent=None, params={}, tags={}, at=i)
"""


@pytest.mark.slow
def test_a_fresh_database_is_used_by_several_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST_USER, str(tmp_path)]
    users = [
        subprocess.Popen(
            [*command, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    for user in users:
        assert user.stdout and user.stdout.readline() == "ready\n"
    for user in users:
        assert user.stdin
        user.stdin.write("go\n")
        user.stdin.flush()
    for user in users:
        _, printed = user.communicate(timeout=120)
        assert user.returncode == 0, printed
    made = mlflow.client(mlflow.default_uri(tmp_path))
    experiments = {each.name: each.experiment_id for each in made.search_experiments()}
    assert {f"experiment {i}" for i in range(5)} <= experiments.keys()
    assert all(len(made.search_runs([experiments[f"experiment {i}"]])) == 3 for i in range(5))


def test_the_tables_of_a_database_are_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "_LONGEST_WAIT_S", 0.1)
    lock = f"{tmp_path}/mlflow.db.lock"
    with FileLock(lock), pytest.raises(ConfigError, match=rf"another process has held {lock} for 0\.1 s$"):
        mlflow.MLflowService(mlflow.default_uri(tmp_path)).check("rlx")
