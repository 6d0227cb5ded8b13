"""Prompt files of every format, alone, in folders, by globs and on S3; the reading runs in real Ray tasks."""

import glob
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray.data
from pyarrow import fs

from rlx.config.errors import ConfigError
from rlx.config.sections.data import DataConfig, EvalConfig
from rlx.config.sections.reward import RewardConfig
from rlx.data import ray_data, sources
from rlx.data.stored import files, parsers
from rlx.data.stored import source as stored
from rlx.data.stored.columns import Columns
from rlx.data.stored.parsers import Part
from rlx.rewards.scoring import answer_check
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import upload_file

pytestmark = pytest.mark.usefixtures("ray_cluster")

CHECK_TESTS = answer_check(RewardConfig(functions={"code": 1.0}))

FILES = DataConfig(source="prompts.csv", params={})
COLUMNS = Columns("question", "answer")


def plain(question: str, answer: str) -> dict[str, Any]:
    return {"question": question, "answer": answer, "messages": None}


def jsonl(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    ".jsonl": jsonl,
    ".parquet": lambda file, records: pd.DataFrame(records).to_parquet(file),
    ".json": lambda file, records: json.dump(records, file.open("w")),
    ".csv": lambda file, records: pd.DataFrame(records).to_csv(file, index=False),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_rows_keep_file_order_and_become_text(tmp_path: Path, suffix: str) -> None:
    records = [{"asked": f"q{i}", "other": None if i == 5 else i, "solution": i} for i in range(300)]
    WRITERS[suffix](tmp_path / f"p{suffix}", records)
    config = DataConfig(source="x.csv", prompt_column="asked", answer_column="solution")
    found = sources.read_rows(str(tmp_path / f"p{suffix}"), config, "data.source").take_all()
    assert found == [plain(f"q{i}", str(i)) for i in range(300)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_swapped_columns_and_lines_within_a_text(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"p{suffix}", [{"question": "a", "answer": 'b\nc\u2028"d", e'}])
    config = DataConfig(source="x.csv", prompt_column="answer", answer_column="question")
    found = sources.read_rows(str(tmp_path / f"p{suffix}"), config, "data.source").take_all()
    assert found == [plain('b\nc\u2028"d", e', "a")]


@pytest.mark.parametrize(
    ("name", "content", "answers"),
    [
        ("a.csv", "question,answer\na,007\nb,1e3\nc,NA\nd,2024-01-01\ne,42\nf,1.50\n", ["007", "1e3", "NA"]),
        ("a.jsonl", '{"question":"a","answer":42}\n\n{"question":"b","answer":1.5}\r\n', ["42", "1.5"]),
        ("b.jsonl", '{"question":"a","answer":"2024-01-01"}\n{"question":"b","answer":7.0}', ["2024-01-01", "7"]),
        ("b.json", '[{"question":"a","answer":true},{"question":"b","answer":false}]', ["true", "false"]),
        ("b.csv", "question,answer\na,true\nb,False\n", ["true", "False"]),
        ("c.jsonl", '{"question":"a","answer":12345678901234567891}', ["12345678901234567891"]),
        ("d.jsonl", '{"question":"a","answer":"x","more":[1]}\n{"answer":"y","question":"b"}\n', ["x", "y"]),
    ],
)
def test_answers_are_the_text_of_the_file(tmp_path: Path, name: str, content: str, answers: list[str]) -> None:
    (tmp_path / name).write_text(content)
    found = [row["answer"] for row in sources.read_rows(str(tmp_path / name), FILES, "data.source").take_all()]
    assert found[: len(answers)] == answers
    if name == "a.csv":
        assert found[3:] == ["2024-01-01", "42", "1.50"]


def test_truth_values_in_parquet_are_spelled_as_in_json(tmp_path: Path) -> None:
    table = pa.table({"question": ["a", "b"], "answer": [True, False]})
    pa.parquet.write_table(table, tmp_path / "p.parquet")
    assert answers(str(tmp_path / "p.parquet")) == ["true", "false"]


def test_integers_that_pandas_made_floats_are_integers_again(tmp_path: Path) -> None:
    frame = pd.DataFrame({"question": ["a", "b", "c"], "answer": [42, None, 7]}).dropna()
    assert frame["answer"].dtype == float
    frame.to_parquet(tmp_path / "p.parquet")
    found = sources.read_rows(str(tmp_path / "p.parquet"), FILES, "data.source").take_all()
    assert [row["answer"] for row in found] == ["42", "7"]


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bomb.parquet"
    pd.DataFrame({"question": ["q" * 4000] * 5000, "answer": ["a"] * 5000}).to_parquet(file)
    assert file.stat().st_size < 100_000
    monkeypatch.setattr(parsers, "_TABLE_BYTES", 1 << 20)
    part = Part("bomb.parquet", str(file))
    with pa.OSFile(str(file)) as opened, pytest.raises(ValueError, match=r"bomb\.parquet: 5000 rows unpack to 19 MiB"):
        list(parsers.parse_parquet(opened, part, Columns()))


GOOD = '{"question": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.txt",
            "x",
            ": expected reasoning_gym:DATASET, hf:NAME, or a file, folder or glob of .jsonl, .json",
        ),
        ("p.csv", None, ": no such file"),
        ("p.csv", "", ": there are no rows in it"),
        ("p.csv", "question,answer\n", ": there are no rows in it"),
        ("p.jsonl", "", ": there are no rows in it"),
        ("p.jsonl", "\n \n", ": there are no rows in it"),
        ("p.parquet", "x", ": Parquet file size is 1 bytes"),
        ("p.jsonl", GOOD + "\n" + '{"question": "q"', ":3: malformed JSON: "),
        ("p.jsonl", GOOD + "[1]\n", ":2: expected a JSON object per line, found list"),
        (
            "p.jsonl",
            GOOD + '{"question": 5, "answer": "r"}\n',
            ":2: a question is 5, expected text (its answer is 'r')",
        ),
        ("p.jsonl", GOOD + '{"question": " ", "answer": "r"}\n', ":2: a question is ' ', expected text"),
        ("p.jsonl", GOOD + '{"question": "lost"}\n', ":2: the answer to 'lost' is None, expected text or a number"),
        ("p.jsonl", GOOD + '{"question": "q", "answer": NaN}\n', ":2: the answer to 'q' is nan"),
        ("p.jsonl", GOOD + '{"question": "q", "answer": 1e400}\n', ":2: the answer to 'q' is inf"),
        ("p.jsonl", GOOD + '{"question": "q", "answer": [1]}\n', ":2: the answer to 'q' is [1]"),
        ("p.csv", "question,answer\nq,1\nlost,\n", ": row 3: the answer to 'lost' is None"),
        ("p.csv", "question,answer\nq,1\nr,1,2\n", ": CSV parse error: Row #3: Expected 2 columns, got 3"),
        ("p.csv", 'question,answer,note\nq,1,n\nr,2,"see\ns,3,n\n', ":3: a quote is not closed where its cell ends; "),
        (
            "p.csv",
            'question,answer\n"q\n2",1\nr,"2 inches\ns,"3"\nt,4\n',
            ":4: a quote is not closed where its cell ends; ",
        ),
        ("p.csv", "questoin,answer\nq,1\n", ": no column 'question', it has questoin, answer; nearest: questoin"),
        ("p.jsonl", '{"question": "q", "x": 1}\n', ": no column 'answer', it has question, x"),
        ("p.csv", "question,answer,question\nq,1,2\n", ": 2 columns are called 'question'"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line_that_says_where(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        sources.read_rows(str(file), FILES, "eval.source")
    assert str(refused.value).startswith(f"eval.source {file}{message}")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


WHERE = {".jsonl": ":41", ".json": ": row 41", ".csv": ": row 42", ".parquet": ": row 41"}  # a header is a row


@pytest.mark.parametrize("suffix", WRITERS)
def test_unit_tests_of_all_rows_are_checked_where_they_are_read(tmp_path: Path, suffix: str) -> None:
    file, rows = tmp_path / f"p{suffix}", [{"question": f"q{i}", "answer": "assert f(1) == 2"} for i in range(60)]
    WRITERS[suffix](file, rows)
    assert sources.read_rows(str(file), FILES, "data.source", CHECK_TESTS).count() == 60
    rows[40]["answer"] = "assert f(1 == 2"
    WRITERS[suffix](file, rows)
    with pytest.raises(ConfigError) as refused:
        sources.read_rows(str(file), FILES, "data.source", CHECK_TESTS)
    assert str(refused.value).startswith(f"data.source {file}{WHERE[suffix]}: reward code: the answer holds no tests: ")
    with pytest.raises(ConfigError, match=r": row 41: |:41: |: row 42: "):
        sources.training_and_held_out_rows(DataConfig(source=str(file), params={}), EvalConfig(), CHECK_TESTS)
    assert sources.read_rows(str(file), FILES, "data.source").count() == 60  # other rewards take any text


def test_a_bad_row_of_a_later_part_of_a_parquet_file_has_its_number_in_the_file(tmp_path: Path) -> None:
    answers = ["1"] * 25 + [None] + ["1"] * 14
    table = pa.table({"question": [f"q{i}" for i in range(40)], "answer": answers})
    pa.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=10)
    part = Part("p.parquet", str(tmp_path / "p.parquet"), index=1, count=2)
    with (
        pa.OSFile(part.path) as opened,
        pytest.raises(ValueError, match=r"^p\.parquet: row 26: the answer to 'q25' is"),
    ):
        list(parsers.read_part(opened, part, COLUMNS))


def test_a_question_that_is_a_number_in_parquet_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"question": [5], "answer": ["x"]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match=r"p\.parquet: row 1: a question is 5, expected text"):
        sources.read_rows(str(tmp_path / "p.parquet"), FILES, "data.source")


@pytest.mark.parametrize(("count", "size", "held_out"), [(40, 3, 3), (40, 100, 4), (2, 5, 1), (9, 5, 1)])
def test_the_last_rows_are_held_out_at_most_a_tenth(count: int, size: int, held_out: int) -> None:
    source = ray.data.from_items([{"n": i} for i in range(count)], override_num_blocks=2)
    train, rest = stored.hold_out(source, size)
    assert [row["n"] for row in train.take_all()] == list(range(count - held_out))
    assert [row["n"] for row in rest] == list(range(count - held_out, count))


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"1 rows are too few to hold one out; set eval\.source"):
        stored.hold_out(ray.data.from_items([{"n": 1}]), 5)


# --- several files


def records(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "answer": f"{i:03}"} for i in range(start, stop)]


def answers(address: str, setting: str = "data.source") -> list[str]:
    return [row["answer"] for row in sources.read_rows(address, FILES, setting).take_all()]


def numbers(start: int, stop: int) -> list[str]:
    return [f"{i:03}" for i in range(start, stop)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_folder_is_its_files_sorted_by_name(tmp_path: Path, suffix: str) -> None:
    for name, start in [("b", 20), ("a", 0), ("c", 30)]:
        WRITERS[suffix](tmp_path / f"{name}{suffix}", records(start, start + 10 + 10 * (name == "a")))
    (tmp_path / "README.md").write_text("not a prompt")
    (tmp_path / f"_hidden{suffix}").write_text("x")
    (tmp_path / f".hidden{suffix}").write_text("x")
    (tmp_path / "below").mkdir()
    WRITERS[suffix](tmp_path / "below" / f"d{suffix}", records(90, 99))
    assert answers(str(tmp_path)) == numbers(0, 20) + numbers(20, 30) + numbers(30, 40)


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(["train-0.jsonl", "train-1.jsonl", "sums-0.jsonl", "x/train-2.jsonl", "x/y/3.jsonl"]):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        jsonl(tmp_path / name, records(number, number + 1))
    (tmp_path / "train.csv").write_text("question,answer\nq,csv\n")
    assert answers(f"{tmp_path}/train-*.jsonl") == ["000", "001"]
    assert answers(f"{tmp_path}/*-[0]*.jsonl") == ["002", "000"]
    assert answers(f"{tmp_path}/**/*.jsonl") == ["002", "000", "001", "003", "004"]
    assert answers(f"{tmp_path}/*/*.jsonl") == ["003"]
    assert answers(f"{tmp_path}/x/**/?.jsonl") == ["004"]
    monkeypatch.chdir(tmp_path)
    assert answers("train-?.jsonl") == ["000", "001"]
    assert sources.resolve("train-?.jsonl") == f"{tmp_path}/train-?.jsonl"


@pytest.mark.parametrize("name", ["_mine.jsonl", ".mine.jsonl"])
def test_a_hidden_file_is_read_by_its_own_name_alone(name: str, tmp_path: Path) -> None:
    jsonl(tmp_path / name, records(0, 2))
    jsonl(tmp_path / "p.jsonl", records(2, 5))
    assert answers(str(tmp_path / name)) == numbers(0, 2)
    assert answers(str(tmp_path)) == answers(str(tmp_path / "*.jsonl")) == numbers(2, 5)


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "p[1].jsonl", records(0, 2))
    assert answers(str(tmp_path / "p[1].jsonl")) == ["000", "001"]


ALL = "all files ending in .jsonl, .json, .csv, .parquet"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("mixed", "it has .csv and .jsonl files; name those of one format, e.g. {}/mixed/*.csv"),
        ("mixed/*", "it has .csv and .jsonl files; name those of one format"),
        ("none", "the folder has no file ending in .jsonl, .json, .csv, .parquet"),
        ("none/*.jsonl", "no file ending in .jsonl, .json, .csv, .parquet matches"),
        ("hidden/_*.jsonl", f"{ALL} that match begin with _ or .: name one exactly, e.g. {{}}/hidden/_y.jsonl"),
        ("hidden/.?.jsonl", f"{ALL} that match begin with _ or .: name one exactly, e.g. {{}}/hidden/.z.jsonl"),
        ("**/[_]y.jsonl", f"{ALL} that match begin with _ or .: name one exactly, e.g. {{}}/hidden/_y.jsonl"),
        ("hidden/y*", "no file ending in .jsonl, .json, .csv, .parquet matches"),
        ("hidden", f"{ALL} in the folder begin with _ or .: name one exactly, e.g. {{}}/hidden/.z.jsonl"),
        ("gone/*.jsonl", "no file ending in .jsonl, .json, .csv, .parquet matches"),
        ("empty", "there are no rows in it"),
        ("gone.jsonl", "no such file"),
        ("gone", "expected reasoning_gym:DATASET, hf:NAME, or a file, folder or glob of .jsonl, .json"),
        ("notes.txt", "expected reasoning_gym:DATASET, hf:NAME, or a file, folder or glob of .jsonl, .json"),
    ],
)
def test_an_address_without_usable_files_is_refused_before_ray_starts(
    tmp_path: Path, address: str, message: str
) -> None:
    files = "mixed/a.csv", "mixed/b.jsonl", "none/a.txt", "empty/a.jsonl", "empty/b.jsonl", "notes.txt"
    for name in (*files, "hidden/_y.jsonl", "hidden/.z.jsonl", "hidden/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else "x")
    with pytest.raises(ConfigError) as refused:
        sources.check_source(f"{tmp_path}/{address}", FILES, "eval.source")
    assert str(refused.value).startswith(f"eval.source {tmp_path}/{address}: {message.format(tmp_path)}")


OTHERS = [
    (["data/train-0.parquet", "data/test-0.parquet"], ["/data/train-[0-9]*.parquet", "/data/test-[0-9]*.parquet"]),
    (["train/a.csv", "test/b/c.csv"], ["/train/**/*.csv", "/test/**/*.csv"]),
    (["x/a.csv", "y/b.jsonl", "y/z/c.jsonl"], ["/**/*.jsonl"]),
    (["a.csv", "b.jsonl"], ["/*.jsonl"]),
    (["a.csv", "b.JSONL"], ["/*.JSONL"]),
    (["x/a.CSV", "y/b.csv"], ["/**/*.[Cc][Ss][Vv]"]),
    (["train/a.CSV", "test/b.CSV"], ["/train/**/*.CSV", "/test/**/*.CSV"]),
    (["a.csv", "train.jsonl", "test.jsonl"], ["/train.jsonl", "/test.jsonl"]),
]
SPLITS = [
    (["train-00000.parquet", "test-00000.parquet"], ["/train-[0-9]*.parquet", "/test-[0-9]*.parquet"]),
    (["train.jsonl", "train_1.jsonl", "test.jsonl"], ["/train.jsonl", "/train_[0-9]*.jsonl", "/test.jsonl"]),
    (["train.csv", "val.csv", "validation.csv"], ["/train.csv", "/val.csv", "/validation.csv"]),
    (["train-0-of-1-0123456789abcdef.csv", "dev0.csv", "c.csv"], ["/train-[0-9]*-of-[0-9]*.csv", "/dev[0-9]*.csv"]),
    (["train.csv", "training-notes.csv", "test.csv"], ["/train.csv", "/test.csv"]),
    (["train.CSV", "test.CSV"], ["/train.CSV", "/test.CSV"]),
    (["train-0.csv", "train-1.csv", "train-2-notes.csv", "test.csv"], ["/train-[0-9].csv", "/test.csv"]),
    (
        ["train-0-of-2.csv", "train-1-of-2.csv", "test-0-of-1.csv", "train-9notes.csv"],
        ["/train-[0-9]*-of-[0-9]*.csv", "/test-[0-9]*-of-[0-9]*.csv"],
    ),
]


def put_files(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        WRITERS[Path(name).suffix.lower()](folder / name, records(0, 3))
    return folder


@pytest.mark.parametrize("folder", ["plain", "a[1]"])
@pytest.mark.parametrize(("names", "named"), OTHERS)
def test_a_folder_whose_files_cannot_be_read_as_one_is_refused_with_globs_that_work(
    tmp_path: Path, folder: str, names: list[str], named: list[str]
) -> None:
    place = put_files(tmp_path / folder, names)
    globs = [f"{glob.escape(str(place))}{each}" for each in named]
    with pytest.raises(ConfigError) as refused:
        sources.check_source(str(place), FILES, "eval.source")
    assert str(refused.value).endswith(f" {' or '.join(globs)}")
    for each in globs:
        sources.check_source(each, FILES, "eval.source")


def split_problem(address: object) -> str | None:
    try:
        sources.check_new_prompts(DataConfig(source=str(address)), EvalConfig())
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("folder", ["plain", "a[1]"])
@pytest.mark.parametrize(("names", "named"), SPLITS)
def test_a_folder_with_several_splits_is_refused_for_a_new_run_with_globs_that_work(
    tmp_path: Path, folder: str, names: list[str], named: list[str]
) -> None:
    place = put_files(tmp_path / folder, names)
    everything, *globs = [f"{glob.escape(str(place))}{each}" for each in (f"/*{Path(names[0]).suffix}", *named)]
    said = f"it has files of several splits; name all, {everything}, or those of one: {' or '.join(globs)}"
    assert split_problem(place) == f"data.source {place}: {said}"
    for each in (everything, *globs):
        assert split_problem(each) is None
    taken = [glob.glob(each) for each in globs]
    assert all(each and len({re.split("[-_.0-9]", Path(file).name)[0] for file in each}) == 1 for each in taken)
    assert not [file for each in taken for file in each if "notes" in file]


@pytest.mark.parametrize("name", ["a" * 300, f"{'a' * 300}.csv"])
def test_a_name_that_is_too_long_is_refused_as_the_setting_that_has_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.source a+"):
        sources.check_source(sources.resolve(name), FILES, "data.source")


def test_the_glob_of_all_files_has_each_way_in_which_their_suffix_is_written(tmp_path: Path) -> None:
    place = put_files(tmp_path, ["train.csv", "test.CSV"])
    everything = f"{place}/*.[Cc][Ss][Vv]"
    assert f"name all, {everything}, or those of one: {place}/train.csv or {place}/test.CSV" in (
        split_problem(place) or ""
    )
    assert len(files.find_files(everything, "data.source")[1]) == 2
    sources.check_source(str(place), FILES, "data.source")  # a run that has begun goes on


@pytest.mark.parametrize(
    "names",
    [
        ["train.csv", "more.csv"],
        ["trainer.csv", "testing.csv"],
        ["test-0.csv", "test-1.csv"],
        ["train.csv", "dev-ops.csv"],
        ["val.csv", "dev.csv"],
    ],
)
def test_a_folder_with_one_split_or_other_names_is_read_as_a_whole(tmp_path: Path, names: list[str]) -> None:
    assert split_problem(put_files(tmp_path, names)) is None


def test_an_empty_file_is_of_no_split(tmp_path: Path) -> None:
    (put_files(tmp_path, ["train.csv"]) / "test.csv").touch()
    assert split_problem(tmp_path) is None


@pytest.mark.parametrize("pattern", ["t*.csv", "topics/**/*.csv"])
def test_a_glob_takes_all_that_it_names(tmp_path: Path, pattern: str) -> None:
    put_files(tmp_path, ["train.csv", "test.csv", "topics/train/a.csv", "topics/test/a.csv"])
    assert split_problem(tmp_path / pattern) is None


def test_what_may_be_a_name_on_the_hub_is_told_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"; of Hugging Face's data sets: hf:some/set$"):
        sources.check_source("some/set", FILES, "data.source")


def test_a_file_with_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_text("question,answer\n")
    with pytest.raises(ConfigError, match=r"^eval\.source .*a\.CSV: there are no rows in it$"):
        sources.check_source(f"{tmp_path}/a.CSV", FILES, "eval.source")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("question;answer\n1;2", r"it has question;answer: its columns are separated by ;"),
        ("question\tanswer\n1\t2", r"its columns are separated by tabs, where , is expected"),
        ("question, answer\n1,2", r"no column 'answer', it has question, ' answer'; nearest: ' answer';"),
    ],
)
def test_a_header_with_other_separators_or_blanks_is_named_as_that(tmp_path: Path, header: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n")
    with pytest.raises(ConfigError, match=said):
        sources.check_source(f"{tmp_path}/a.csv", FILES, "data.source")


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE", "UTF-16BE"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_a_file_in_utf_16_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, suffix: str, encoding: str
) -> None:
    file = tmp_path / f"a b{suffix}"
    WRITERS[suffix](file, records(0, 3))
    plain = file.read_text()
    file.write_bytes(plain.encode(encoding))
    with pytest.raises(ConfigError) as refused:
        sources.check_source(str(file), FILES, "data.source")
    command = f"iconv -f {encoding} -t UTF-8 '{file}' > utf8{suffix}"
    assert str(refused.value) == f"data.source {file}: it is {encoding}, not UTF-8: {command}"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / f"utf8{suffix}").read_text() == plain


def test_an_empty_file_among_others_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    WRITERS[".csv"](tmp_path / "b.csv", records(0, 3))
    assert answers(str(tmp_path)) == numbers(0, 3)


def test_an_error_names_the_file_of_the_folder_and_its_line(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", records(0, 3))
    (tmp_path / "b.jsonl").write_text('{"question": "q", "answer": 1}\n\n{"question": "q"}\n')
    with pytest.raises(ConfigError, match=rf"^data\.source {tmp_path}/b\.jsonl:3: the answer to 'q' is None"):
        answers(str(tmp_path))


# --- large files


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 500)


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("count", range(1, 12))
def test_parts_of_a_jsonl_file_have_each_line_once(tmp_path: Path, count: int, end: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '\n{"question": "a", "answer": 1}\n\n{"question": "b", "answer": 2}\n{"question":"c","answer":3}' + end
    )
    found = []
    for index in range(count):
        with fs.LocalFileSystem().open_input_file(str(path)) as file:
            part = Part("p.jsonl", "p.jsonl", index, count)
            found += [row for table in parsers.read_part(file, part, COLUMNS) for row in table.to_pylist()]
    assert [row["answer"] for row in found] == ["1", "2", "3"]


@pytest.mark.parametrize("bad", range(12))
def test_an_error_in_a_part_has_the_line_in_the_file(bad: int) -> None:
    lines = [json.dumps(record) for record in records(0, 12)]
    lines[bad] = "{"
    content, wrong = "\n".join(lines).encode(), []
    for index in range(5):
        part = Part("p.jsonl", "p.jsonl", index, 5)
        try:
            list(parsers.read_part(pa.BufferReader(content), part, COLUMNS))
        except ValueError as error:
            wrong.append(str(error).partition(" ")[0])
    assert wrong == [f"p.jsonl:{bad + 1}:"]


def test_a_line_longer_than_a_part_belongs_to_the_part_that_it_begins_in() -> None:
    content = b'{"question": "a", "answer": "' + b"x" * 200_000 + b'"}\n{"question": "b", "answer": 2}\n'
    sizes = []
    for index in range(40):
        tables = parsers.read_part(pa.BufferReader(content), Part("p.jsonl", "p.jsonl", index, 40), COLUMNS)
        sizes += [len(row["answer"]) for table in tables for row in table.to_pylist()]
    assert sizes == [200_000, 1]


@pytest.mark.slow
def test_a_large_file_is_read_in_parallel_parts_in_its_order(tmp_path: Path, small_pieces: None) -> None:
    jsonl(tmp_path / "p.jsonl", records(0, 200))
    rows = sources.read_rows(str(tmp_path / "p.jsonl"), FILES, "data.source").materialize()
    assert rows.num_blocks() == -(-(tmp_path / "p.jsonl").stat().st_size // 500) > 10
    assert [row["answer"] for row in rows.take_all()] == numbers(0, 200)


def test_row_groups_of_parquet_are_read_in_parallel(tmp_path: Path, small_pieces: None) -> None:
    table = pa.Table.from_pylist([{**record, "more": "x"} for record in records(0, 200)])
    pa.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=30)
    assert answers(str(tmp_path / "p.parquet")) == numbers(0, 200)
    reader = files.PartReader(fs.LocalFileSystem(), COLUMNS)
    parts = [Part("p", str(tmp_path / "p.parquet"), index, 3) for index in range(3)]
    assert [sum(map(len, reader([part]))) for part in parts] == [60, 60, 80]


def test_many_small_files_are_read_together() -> None:
    found = [files.PromptFile(f"{i}.csv", f"{i}.csv", size) for i, size in enumerate([2, 1, 0, 3, 9, 1, 2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_BYTES", 4)
        assert [[part.name[0] for part in piece] for piece in files.pieces_of(found)] == [
            ["0", "1"],
            ["3"],
            ["4"],
            ["5", "6"],
        ]
        lines = [files.PromptFile("a.jsonl", "a.jsonl", 9), files.PromptFile("b.jsonl", "b.jsonl", 1)]
        pieces = [[(part.name[0], part.index, part.count) for part in piece] for piece in files.pieces_of(lines)]
        assert pieces == [[("a", 0, 3)], [("a", 1, 3)], [("a", 2, 3)], [("b", 0, 1)]]


def test_of_many_errors_the_first_in_the_file_is_named(tmp_path: Path, small_pieces: None) -> None:
    """Also where a later part fails sooner: the column's name is wrong in all of them."""
    jsonl(tmp_path / "p.jsonl", [{"questoin": f"q{i}", "answer": i} for i in range(100)])
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"p\.jsonl: no column 'question', .*; nearest: questoin; --data"):
            answers(str(tmp_path / "p.jsonl"))


def test_large_rows_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_data, "BLOCK_BYTES", 20_000)
    WRITERS[".csv"](tmp_path / "p.csv", [{"question": "q" * 100, "answer": f"{i:03}"} for i in range(900)])
    rows = sources.read_rows(str(tmp_path / "p.csv"), FILES, "data.source")
    monkeypatch.undo()
    assert rows.num_blocks() > 2 and answers(str(tmp_path / "p.csv")) == numbers(0, 900)


# --- S3


def upload(address: str, file: Path) -> None:
    upload_file(file, open_storage(address) / file.name)


@pytest.mark.slow
def test_files_folders_and_globs_on_s3(bucket: str, tmp_path: Path) -> None:
    for number, suffix in enumerate(WRITERS):
        for name in (f"a{suffix}", f"b{suffix}"):
            WRITERS[suffix](tmp_path / name, records(number, number + 2))
            upload(f"{bucket}/{suffix[1:]}", tmp_path / name)
        assert answers(f"{bucket}/{suffix[1:]}/a{suffix}") == numbers(number, number + 2)
        assert answers(f"{bucket}/{suffix[1:]}") == numbers(number, number + 2) * 2
    assert answers(f"{bucket}/*/[b].jsonl") == numbers(0, 2)


@pytest.mark.slow
def test_a_large_file_on_s3_is_read_in_parts(bucket: str, tmp_path: Path, small_pieces: None) -> None:
    jsonl(tmp_path / "p.jsonl", records(0, 100))
    upload(bucket, tmp_path / "p.jsonl")
    assert answers(f"{bucket}/p.jsonl") == numbers(0, 100)
    assert answers(f"{bucket}/p.jsonl?region=us-east-1") == numbers(0, 100)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/none.jsonl", "{}/none.jsonl: no such file"),
        ("/*.jsonl", "{}/*.jsonl: no file ending in"),
        ("/p.jsonl", "{}/p.jsonl:2: malformed JSON"),
    ],
)
def test_errors_on_s3_name_the_object(bucket: str, tmp_path: Path, address: str, message: str) -> None:
    if address == "/p.jsonl":
        (tmp_path / "p.jsonl").write_text(GOOD + "{")
        upload(bucket, tmp_path / "p.jsonl")
    with pytest.raises(ConfigError) as refused:
        answers(f"{bucket}{address}")
    assert str(refused.value).startswith(f"data.source {message.format(bucket)}")


def test_an_address_with_a_key_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match=r"^eval\.source: storage s3://\.\.\.: the address holds a key") as refused:
        sources.check_source("s3://bucket/p.jsonl?secret_key=abc", FILES, "eval.source")
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_and_the_first_rows_are_seen_without_ray(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"p{suffix}", [{"asked": "1 + 1", "answer": i} for i in range(3)])
    data = DataConfig(source=str(tmp_path / f"p{suffix}"), params={})
    wanted = r"no column 'question', it has asked, answer.*; --data\.prompt-column names another$"
    with pytest.raises(ConfigError, match=rf"^eval\.source .*p{suffix}: {wanted}"):
        sources.check_source(data.source, data, "eval.source")
    named = data.model_copy(update={"prompt_column": "asked"})
    sources.check_source(data.source, named, "data.source")
    assert sources.first_rows(named, 2) == [plain("1 + 1", f"{i}") for i in range(2)]
