"""Benchmarks side by side: which GPUs they get, in which order, and that nothing of them is left."""

from collections.abc import Sequence
from pathlib import Path

import on_gpus
import pytest
import yaml

from rlx.config.loading import read_yaml

FILE = Path(on_gpus.__file__).with_name("gpu_jobs.yaml")


def ran(folder: Path, jobs: list[dict[str, object]], gpus: int) -> dict[str, str]:
    """What each job printed, and what there was to say of all."""
    (folder / "jobs.yaml").write_text(yaml.safe_dump({"jobs": jobs}))
    assert on_gpus.main([str(folder / "jobs.yaml"), "--out", str(folder / "out"), "--gpus", str(gpus)]) == 0
    return {each.stem: each.read_text() for each in (folder / "out").iterdir()}


@pytest.mark.slow
def test_each_job_has_gpus_of_its_own_and_waits_for_those_before_it(tmp_path: Path) -> None:
    jobs: list[dict[str, object]] = [
        {"name": "one", "command": "echo on $CUDA_VISIBLE_DEVICES; sleep 1; exit 3"},
        {"name": "two", "gpus": 2, "command": "echo on $CUDA_VISIBLE_DEVICES; sleep 1"},
        {"name": "all", "gpus": 3, "command": "echo on $CUDA_VISIBLE_DEVICES"},
        {"name": "last", "after": ["one", "all"], "command": "echo on $CUDA_VISIBLE_DEVICES"},
        {"name": "many", "gpus": 4, "command": "echo too many"},
    ]
    found = ran(tmp_path, jobs, gpus=3)
    assert [found[name].splitlines()[1] for name in ("one", "two", "all", "last")] == [
        "on 0", "on 1,2", "on 0,1,2", "on 0",
    ]  # fmt: skip
    events = [line.split(" ", 1)[1] for line in found["events"].splitlines()]
    assert events[:2] == ["one begins on [0]", "two begins on [1, 2]"]
    assert any(line.startswith("one ends after") and line.endswith("exit status 3") for line in events)
    assert events.index("all begins on [0, 1, 2]") > max(
        i for i, line in enumerate(events) if line.startswith(("one ends", "two ends"))
    )
    assert events[-1] == "left out, for want of GPUs: many" and "many" not in found


def test_nothing_is_left_of_a_job_whose_time_is_over(tmp_path: Path) -> None:
    stays = f"setsid sh -c 'trap \"\" INT; sleep 60; echo late > {tmp_path}/late' & sleep 60"
    found = ran(tmp_path, [{"name": "slow", "seconds": 1, "command": stays}], gpus=1)
    assert "its time is over" in found["events"]
    assert on_gpus.processes_of("slow") == [] and not (tmp_path / "late").exists()


@pytest.mark.slow
def test_a_file_that_is_being_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each look there is more of a second file, which may be YAML or not, until all of it is there."""
    first: list[dict[str, object]] = [{"name": "one", "command": "sleep 2; echo whole"}]
    text = yaml.safe_dump({"jobs": [*first, {"name": "two", "command": "echo added"}]})
    ends = iter([*range(0, len(text), 4), *[len(text)] * 10_000])

    def look(file: Path, only: Sequence[str]) -> list[on_gpus.Job] | None:
        file.write_text(text[: next(ends)])
        return again(file, only)

    again = on_gpus.read_again
    monkeypatch.setattr(on_gpus, "read_again", look)
    monkeypatch.setattr(on_gpus, "_LOOK_S", 0.05)
    found = ran(tmp_path, first, gpus=1)
    assert found["one"].endswith("whole\n") and found["two"].endswith("added\n")


@pytest.mark.parametrize("job", on_gpus.read_jobs(FILE), ids=lambda job: job.name)
def test_the_jobs_of_the_repository_name_scripts_that_exist(job: on_gpus.Job) -> None:
    assert set(job.after) <= {each["name"] for each in read_yaml(FILE)["jobs"]}
    scripts = [word for word in job.command.split() if word.startswith(("bench/", "tests/"))]
    assert scripts and all((FILE.parent.parent / word).exists() for word in scripts)
