"""`rlx samples`: the table, the page, and what is refused."""

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sample_cases import Letters, scored, step

from rlx.cli.main import main
from rlx.cli.samples import completions_table, readable
from rlx.samples.columns import Kind, StepCompletions
from rlx.samples.writer import CompletionWriter, Keeping
from rlx.storage.addresses import open_storage
from rlx.types import Episode, FailureKind, Observation, Turn


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two runs, each with two steps and an evaluation, and one that has kept nothing."""
    monkeypatch.setattr(sys, "argv", ["rlx"])
    for name in ("one", "two", "none"):
        run = open_storage(str(tmp_path)) / "runs" / name
        for file in ("run.json", "config.yaml"):
            (run / file).write_text("{}")
        if name == "none":
            continue
        writer = CompletionWriter(run, Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
        writer.keep(step(4))
        writer.keep(step(5))
        writer.keep(StepCompletions(Kind.HELD_OUT, 4, 8, [scored(0, "held out")]))
        writer.close()
    yield str(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["samples", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_the_newest_step_is_shown_with_its_numbers(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "one", "--storage", storage).splitlines()
    header, _, first, *_ = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names = ["step", "prompt", "right", "score", "parts", "advantage", "mismatch", "finish", "tokens"]
    assert header == [*names, "question", "expected", "answer", "completion"]
    assert first == [
        "5",
        "2.0",
        "no",
        "0",
        "task 0 length -1",
        "0",
        "0.5",
        "stop",
        "1",
        "question 0",
        "yes",
        "none found",
        "text",
    ] or (first[4] == "task 0  length -1")
    place = f"in {storage}/runs/one/completions"
    assert lines[-1] == f"4 of 4 completions of step 5; mean score 0.375, 25% right; {place}"


def test_an_episode_whose_environment_failed_is_named_and_counted(
    storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = ("", "raised LookupError: no row", "took longer than 5 s", "")
    kinds: tuple[FailureKind | None, ...] = (None, "raised", None, None)  # the third is of an older version
    rows = []
    for number, (failure, kind) in enumerate(zip(failures, kinds, strict=True)):
        row = scored(number)
        turn = Turn(0, 1, 4, Observation(done=True))
        raised_at = "env.py:3" if kind else ""
        episode = Episode(Observation(), (turn,), failure=failure, kind=kind, raised_at=raised_at) if number else None
        rows.append(replace(row, completion=replace(row.completion, episode=episode)))
    writer = CompletionWriter(open_storage(storage) / "runs" / "one", Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
    writer.keep(StepCompletions(Kind.TRAINING, 6, 8, rows))
    writer.close()
    header, _, *shown, _, summary = said(capsys, "one", "--storage", storage).splitlines()
    finish = header.split("|").index(next(cell for cell in header.split("|") if cell.strip() == "finish"))
    assert [line.split("|")[finish].strip() for line in shown] == ["stop", "failed: raised", "failed", "stop"]
    assert "raised LookupError: no row at env.py:3" in shown[1] and "took longer than 5 s" in shown[2]
    assert "; the environments of 2 failed; " in summary


def test_the_worst_the_best_a_prompt_a_step_and_evaluations(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    def prompts(*words: str) -> list[str]:
        lines = said(capsys, "one", "--storage", storage, *words).splitlines()[2:-2]
        return [line.split("|")[2].strip() for line in lines]

    assert prompts("--worst", "2") == ["2.0", "2.1"]
    assert prompts("--best", "3") == ["3.1", "3.0", "2.1"]
    assert prompts("--prompt", "3") == ["3.0", "3.1"] * 2
    assert prompts("--prompt", "3", "--step", "5") == ["3.0", "3.1"]
    assert prompts("--step", "4", "--step", "5") == ["2.0", "2.1", "3.0", "3.1"] * 2
    assert "held out" in said(capsys, f"{storage}/runs/one", "--held-out")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("oen",), "no run 'oen' in"),
        (("none",), "run none has kept no completions: tracking.completions was 0"),
        (("one", "--step", "7"), "run one has kept no completions of step 7"),
        (("one", "--step", "5", "--held-out"), "run one has kept no held_out completions of that"),
        (("one", "--prompt", "9"), "--prompt 9 has no completion in 2 steps"),
        (("one", "--prompt", "9", "--step", "5"), "--prompt 9 has no completion in step 5"),
        (("one", "--against", "two"), "--against two needs --html FILE"),
        (("one", "--html", "/nowhere/page.html"), "--html /nowhere/page.html: no folder /nowhere"),
        (("one", "--html", "x.html", "--worst", "3"), "--html shows all kinds"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], error: str, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, *words, "--storage", storage, code=1)
    assert text.startswith(f"error: {error}") and text.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_a_count_is_a_number_from_1_on(number: str, storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["samples", "one", "--storage", storage, "--worst", number])
    assert "expected a whole number above 0" in capsys.readouterr().err


def test_a_page_of_two_runs_is_written(storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    out = said(capsys, "one", "--storage", storage, "--html", str(file), "--against", "two")
    assert out == f"18 of 18 completions of 6 steps and evaluations are in {file}\n"
    text = file.read_text()
    assert "Completions of run one and run two" in text and "two \\u00b7 held-out \\u00b7 step 4" in text
    said(capsys, "one", "--storage", storage, "--html", str(file), "--step", "4")
    assert "step 5" not in file.read_text()


def test_a_page_that_cannot_be_written_replaces_none(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "page.html").write_text("of before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a full disk
    try:
        out = said(capsys, "one", "--storage", storage, "--html", str(file), code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.startswith(f"error: --html {file} cannot be written: ") and out.count("\n") == 1
    assert file.read_text() == "of before" and [each.name for each in tmp_path.glob("page*")] == ["page.html"]


def test_a_page_is_written_into_what_its_file_is(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to a page that only its owner reads, a pipe, or a file that this process has open, as /dev/stdout is."""

    def write(file: Path | str) -> None:
        said(capsys, "one", "--storage", storage, "--html", str(file))

    link, page, pipe, log = (tmp_path / name for name in ("link.html", "www/page.html", "pipe", "log"))
    page.parent.mkdir()
    page.write_text("of before")
    page.chmod(0o600)
    link.symlink_to(page)
    write(link)
    assert link.is_symlink() and "Completions of run one" in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        write(pipe)
        assert read.result(30) == page.read_text() and pipe.is_fifo()
    with log.open("w") as stream:
        for place in (f"/dev/fd/{stream.fileno()}", f"/proc/{os.getpid()}/fd/{stream.fileno()}"):
            stream.write("before\n")
            stream.flush()
            write(place)
        stream.write("after")
        assert os.path.samestat(os.fstat(stream.fileno()), log.stat())
    assert log.read_text() == f"before\n{page.read_text()}" * 2 + "after"
    with log.open("w") as stream, subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=stream) as other:
        stream.write("before\n")
        stream.flush()
        write(f"/proc/{other.pid}/fd/1")
        other.communicate()
    assert log.read_text() == f"before\n{page.read_text()}"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_page_that_is_printed_is_told_of_on_standard_error(
    is_link: bool, storage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What went into the same file before and after stays."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    print("before", flush=True)
    assert (
        main(["samples", "one", "--storage", storage, "--html", str(tmp_path / "link") if is_link else "/dev/fd/1"])
        == 0
    )
    print("after", flush=True)
    out, err = capfd.readouterr()
    assert out.startswith("before\n<!doctype html>") and out.endswith("</html>after\n")
    assert err.endswith(
        " completions of 3 steps and evaluations are in " + str(tmp_path / "link" if is_link else "/dev/fd/1") + "\n"
    )


def test_steps_that_kept_nothing_are_passed_over(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("one", 6), ("none", 2)):
        run = open_storage(storage) / "runs" / name
        writer = CompletionWriter(run, Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
        writer.keep(StepCompletions(Kind.TRAINING, number, 8, []))
        writer.close()
    for words in ((), ("--worst", "3")):
        *_, kept, newer = said(capsys, "one", "--storage", storage, *words).splitlines()
        assert "completions of step 5; mean score 0.375" in kept
        assert newer.startswith("step 6 is newer and has kept none: tracking.completions is the share")
    assert "completions of step 5;" in said(capsys, "one", "--storage", storage, "--step", "5", "--step", "6")
    file = tmp_path / "page.html"
    out = said(capsys, "one", "--storage", storage, "--html", str(file))
    assert out == f"9 of 9 completions of 3 steps and evaluations are in {file}\n"
    for words, error in (
        (("one", "--step", "6"), "step 6 has kept no completion: tracking.completions"),
        (("none",), "no step of run none has kept a completion: tracking.completions"),
        (("none", "--html", str(file)), "no step of run none has kept a completion: tracking.completions"),
    ):
        text = said(capsys, *words, "--storage", storage, code=1)
        assert text.startswith(f"error: {error}") and text.count("\n") == 1


def test_what_controls_a_terminal_is_shown_and_not_sent() -> None:
    assert readable("a\nb\x1b[31mc\u202ed é", None) == "a\\nb\\x1b[31mc\\u202ed é"
    assert readable("abcdef", 4) == "abc…" and readable("abcd", 4) == "abcd"


def test_markup_in_a_completion_is_text(storage: str) -> None:
    from rlx.samples import reader

    run = open_storage(storage) / "runs" / "one"
    (row, *_) = reader.completions(reader.read(run, reader.kept_steps(run)[0]))
    spoilt = row.__class__(**vars(row) | {"completion": "[red]x[/red] | y"})
    assert "[red]x[/red]" in completions_table([spoilt], 200, None)


def test_answers_are_shown_of_sources_with_a_pattern(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one the whole text is the answer, and is shown once."""

    def answers(number: int, said_of: list[tuple[str, str | None, int]]) -> list[str]:
        writer = CompletionWriter(open_storage(storage) / "runs" / "one", Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
        rows = []
        for place, (text, answer, source) in enumerate(said_of):
            row = scored(place, text, answer=answer)
            prompt = replace(row.completion.prompt, source=source)
            rows.append(replace(row, completion=replace(row.completion, prompt=prompt)))
        writer.keep(StepCompletions(Kind.TRAINING, number, 8, rows, sources=["sums", "words"]))
        writer.close()
        header, _, *shown, _, _ = said(capsys, "one", "--storage", storage, "--step", str(number)).splitlines()
        names = [cell.strip() for cell in header.split("|")]
        return [line.split("|")[names.index("answer")].strip() for line in shown if "answer" in names]

    assert answers(6, [("a 4 ", "4", 0), ("4", "4", 0), ("b ", "b", 1), ("a", None, 0)]) == ["4", "4", "", "none found"]
    assert answers(7, [(" a 4 ", "a 4", 0), ("b", "b", 1)]) == []


def test_several_sources_are_named(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_storage(storage) / "runs" / "none"
    writer = CompletionWriter(run, Keeping(1.0, 0, 0, 1), Letters(), pytest.fail)
    first, second = scored(0), scored(1).completion
    other = replace(second, prompt=replace(second.prompt, source=1))
    rows = [first, replace(first, completion=other)]
    writer.keep(StepCompletions(Kind.TRAINING, 1, 8, rows, sources=["sums", "products"]))
    writer.close()
    lines = [line.split("|") for line in said(capsys, "none", "--storage", storage).splitlines()]
    assert [line[2].strip() for line in (lines[0], lines[2], lines[3])] == ["source", "sums", "products"]
    page = Path(storage) / "page.html"
    said(capsys, "none", "--storage", storage, "--html", str(page))
    assert '"products"' in page.read_text()
