"""Bad input of every kind ends in one short line of the right class, and changes nothing on the disk."""

import functools
import io
import json
import math
import os
import runpy
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import SequenceMatcher
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from pyarrow import fs

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig, setting_keys
from rlx.config.sections.data import DataConfig
from rlx.data import prompts, sources
from rlx.data.stored import parsers
from rlx.data.stored.columns import Columns
from rlx.models import tiny
from rlx.rewards import remote, scoring
from rlx.rewards.custom import RewardError
from rlx.rewards.json_server import JsonServer, TransientError
from rlx.runs import run_folder
from rlx.runs.run_folder import finished_metrics
from rlx.storage import addresses, checkpoint_catalog, checkpoint_files, checkpoint_manifest
from rlx.storage.checkpoint_files import CheckpointError, CheckpointReader, Shard
from rlx.storage.checkpoint_manifest import MANIFEST, FileRecord, Manifest
from rlx.storage.filesystem import Storage, StorageError
from rlx.sweeps import plans
from rlx.sweeps.records import SweepPlan, TrialRecords, plan_content
from rlx.sweeps.space import load_space
from rlx.tracking import console, outbox
from rlx.types import Prompt, Response

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
MORE = int(os.environ.get("RLX_EXAMPLES", 1))  # times as many drawn examples
LONGEST = 1000  # characters that still are one clear line, the paths of pytest's folders included


def examples(count: int, **worst: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many drawn examples, the same ones each time, after those that are known to be nasty."""
    # A test's folder outlives its examples: each writes over what the one before it wrote.
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    drawn = settings(
        max_examples=count * MORE, derandomize=True, database=None, deadline=None, suppress_health_check=shared
    )

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        for name, values in worst.items():
            for value in values:
                test = example(**{name: value})(test)
        return drawn(test)

    return decorated


def used_or_refused(call: Callable[[], T], kind: type[Exception], *named: str) -> T | None:
    """What a call gives; None if it raises this very class, in one short line that names what is wrong."""
    try:
        return call()
    except kind as error:
        text = str(error)
        assert type(error) is kind, f"{type(error).__name__} {text}"  # pydantic's errors are ValueErrors too
        assert text.strip() and len(text.splitlines()) == 1 and len(text) < LONGEST, text
        assert all(name in text for name in named), text
        return None


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file that something wrote into, or that was cut short."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(changed)))
        changed[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(changed[: draw(st.none() | st.integers(0, len(changed)))])


NUMBERS = st.sampled_from([-1, 0, 1, 2, 0.5, True, -(2**60), 2**60, 2**64, 10**400, 1e308, math.nan, math.inf])
GARBAGE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
JSON = GARBAGE.map(json.dumps)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# --- settings

SECTIONS = [name for name, field in RunConfig.model_fields.items() if hasattr(field.annotation, "model_fields")]
SETTINGS = b"name: mine\ntrain: {steps: 4, adam_betas: [0.9, 0.95]}\ndata:\n  params: {min_terms: 3, max_terms: 3}\n"
UNFIT = ["!!bool x", "!!timestamp x", "!!int ''", "!!float ''", "2024-99-99", "!!int x", "!!binary é", "&a [*a]"]
"""what PyYAML has no error of its own for, and a list in itself"""
ALIASES = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 7))
"""a few lines that stand for half a million numbers"""
HUGE = "-0x" + "f" * 5000  # a number that Python reads but refuses to print
BAD_FILES = [f"train: {{steps: {text}}}" for text in [*UNFIT, HUGE, '"a\\nb"']]
BAD_FILES += [f"data: {{params: {{x: {nested(depth)}}}}}" for depth in (100, 400, 450, 600)]
BAD_FILES += [f"{ALIASES}train: {{steps: *a6}}", '"a\\nb": 1', 'train: {"a\\n\\u2028": 1}', "1: 2", "? [a, b]\n: 1"]


@examples(70, content=[text.encode() for text in BAD_FILES])
@given(content=st.binary(max_size=40) | damaged(SETTINGS))
def test_any_file_gives_settings_or_a_line_that_names_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    tree = used_or_refused(lambda: read_yaml(path), ConfigError, str(path))
    if tree is not None:
        used_or_refused(lambda: from_tree(with_overrides(tree, {}), str(path)), ConfigError, str(path))
    assert contents(tmp_path) == {str(path): content}


@pytest.mark.slow
@examples(80)
@given(key=st.sampled_from(setting_keys()), place=st.floats(0, 0.999), letters=st.text("aeiost_x", max_size=2))
def test_a_misspelt_key_is_refused_with_the_nearest(key: str, place: float, letters: str) -> None:
    at = int(place * len(key))
    wrong = key[:at] + letters + key[at + 1 :]
    assume(key[at] != "." and wrong not in setting_keys() and all(wrong.split(".")))
    named, meant = (wrong, key) if wrong.partition(".")[0] in SECTIONS else (wrong.split(".")[0], key.split(".")[0])
    with pytest.raises(ConfigError) as error:
        from_tree(with_overrides({}, {wrong: 1}))
    head, _, near = str(error.value).partition("; nearest: ")
    assert head == f"config: unknown setting {named}"
    likeness = [SequenceMatcher(None, word, named).ratio() for word in (near, meant)]
    assert near in [*setting_keys(), *SECTIONS] and likeness[0] >= likeness[1]


WRONG = [[[]], [{"a": [None]}], math.nan, math.inf, -math.inf, b"\xff", {1: 2}, {"": {"": []}}]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_value_of_the_wrong_kind_is_refused_by_name(value: Any) -> None:
    for key in setting_keys():
        if (key, value) != ("data.params", {"": {"": []}}):  # anything may be a parameter
            call = functools.partial(from_tree, with_overrides({}, {key: value}))
            assert used_or_refused(call, ConfigError, "config: ", key) is None


BAD_VALUES: list[tuple[str, Any]] = [("train.steps", "x" * 100_000), ("train.actor_lr", 10**5000)]
BAD_VALUES += [("reward.answer_pattern", pattern) for pattern in ("(" * 3000, "a{99999999999}", "a\n(")]
BAD_VALUES += [("data.params", {"\ud800": 1}), ("reward.functions", {"a\nb": 1}), ("", 1), ("name.x", 1), (".", 1)]
BAD_VALUES += [("train.a\nb", 1), (".".join("a" * 3000), 1), ("data.params" + ".a" * 3000, 1)]
DOTTED = st.lists(st.text(max_size=4) | st.sampled_from(["train", "steps", "data", "params"]), max_size=4).map(".".join)


@pytest.mark.slow
@examples(150, entry=BAD_VALUES)
@given(entry=st.tuples(st.sampled_from([*setting_keys(), *SECTIONS]) | DOTTED, GARBAGE))
def test_any_value_under_any_key_is_taken_or_refused_and_the_tree_stays(entry: tuple[str, Any]) -> None:
    tree = {"name": "mine", "data": {"params": {"min_terms": 3}}}
    before = json.dumps(tree)
    used_or_refused(lambda: from_tree(with_overrides(tree, dict([entry]))), ConfigError)
    assert json.dumps(tree) == before


def test_a_tree_without_end_is_refused() -> None:
    tree = json.loads(nested(600))
    assert used_or_refused(lambda: from_tree(with_overrides({}, {"train": tree})), ConfigError) is None


OPTIONS = [f"--{key.replace('_', '-')}" for key in setting_keys()]
ENTRIES = ["--data.params.x", "--model.lora-targets", "--reward.functions.task", "--scaling.resources-per-worker.CPU"]
WORDS = st.sampled_from([*OPTIONS, *ENTRIES, "--config", "--resume", "--", *UNFIT]) | st.text(max_size=8)
BAD_LINES = [[option, text] for option in ENTRIES[:2] for text in [*UNFIT, nested(600)]]
BAD_LINES += [["--train.steps", HUGE], ["--name", "a\nb"], ["--a\nb"], ["--config", "no\nfile"], ["--config", "a\0b"]]
BAD_LINES += [["--train.step", "\udcff"], ["--reward.functions.\u2028", "1"], ["a\nb"], ["--config", "/"]]


@pytest.mark.slow
@examples(40, words=BAD_LINES)
@given(words=st.lists(WORDS | st.tuples(WORDS, WORDS).map("=".join), max_size=4))
def test_any_command_line_ends_in_a_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "experiments" / "ppo.py"))["main"]
    for command in ("start", "resume"):  # some of the lines are good ones
        monkeypatch.setitem(main.__globals__, command, lambda *_, **__: 0)
    try:
        with redirect_stderr(io.StringIO()) as errors, redirect_stdout(io.StringIO()):
            code = main(words)
    except SystemExit as ended:  # argparse's own
        assert ended.code == 0 or (ended.code == 2 and errors.getvalue().startswith("error: "))
    else:
        lines = errors.getvalue().splitlines()
        assert code in (0, 1) and [line.partition(": ")[0] for line in lines] == ["error"] * code
    assert len(errors.getvalue()) < 2 * LONGEST and not contents(tmp_path)


# --- prompt files


def parquet(question: list[Any], answer: pa.Array) -> bytes:
    file = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"question": pa.array(question), "answer": answer}), file)
    return file.getvalue().to_pybytes()


JSONL = b'{"question": "1 + 1", "answer": "2"}\n{"question": "what\\n\\"is\\"", "answer": 3.5}\n'
LIST = b"[" + JSONL.strip().replace(b"\n", b",") + b"]"
CSV = b'question,answer\n1 + 1,2\n"what\n""is""",3.5\n'
PARQUET = parquet(["1 + 1", "what"], pa.array([1.0, 3.5]))
BAD_PROMPTS = [
    (".jsonl", b'{"question": "a", "answer": ' + b"[" * 100_000, "prompts.jsonl:1: malformed JSON"),
    (".jsonl", b'\n{"question": "\\ud800", "answer": 1}', "prompts.jsonl:2: not valid Unicode"),
    (".jsonl", b'{"quest\\nion": 1}', "no column 'question', it has quest"),
    (".csv", b"\n", "Empty CSV file"),
    (".csv", b'question,answer\n1,"a\nb",3\n', "CSV parse error: Row #2"),
    (".csv", b"question,answer,\xff\n1,2,3\n", "can't decode byte 0xff"),
    (".parquet", PARQUET[:-1], "Parquet magic bytes not found"),
    (".parquet", parquet(["a"], pa.array([0], pa.timestamp("us", "No/Where"))), "No/Where"),
    (".parquet", parquet(["a"], pa.array([2**62], pa.timestamp("us"))), "date value out of range"),
    (".parquet", parquet([b"\xff"], pa.array([1])), "expected text"),
    (".parquet", PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1", "footer"),
    (".csv", b"question,question,answer\n", "2 columns are called"),
    (".jsonl", b'{"question": "a", "answer": ' + b"9" * 5000 + b"}", "4300 digits"),
    (".jsonl", b'\xff\xfe{"question": 1}', "it is UTF-16"),
    (".json", b'[{"question": "a", "answer": 1}, 7]', "prompts.json: row 2: expected a JSON object per row, found int"),
    (".json", b'{"question": "a", "answer": 1}\n{"question": 5}', "prompts.json:2: a question is 5"),
    (".json", LIST[:-3], "malformed JSON"),
    (".jsonl", b'{"question": ["a"], "answer": 1}', "a message is 'a', expected {role, content}"),
    (".json", b'[{"question": [{"role": "user", "content": {}}], "answer": 1}]', "the content of a message is {}"),
    (".json", b'[{"question": [{"role": "\\ud800", "content": "a"}], "answer": 1}]', "prompts.json"),
]
RECORDS = st.lists(st.fixed_dictionaries({"question": GARBAGE, "answer": GARBAGE}) | GARBAGE, max_size=3)
JSON_LINES = damaged(JSONL) | RECORDS.map(lambda records: "\n".join(map(json.dumps, records)).encode())
CSV_LINES = damaged(CSV) | st.binary(max_size=30).map(b"question,answer\n".__add__)
JSON_LISTS = RECORDS.map(lambda records: json.dumps(records).encode()) | damaged(LIST)
ANY_PARQUET = damaged(PARQUET) | st.binary(max_size=40)
BYTES = {".jsonl": JSON_LINES, ".json": JSON_LISTS, ".csv": CSV_LINES, ".parquet": ANY_PARQUET}


@pytest.mark.slow
@examples(120, file=BAD_PROMPTS)
@given(file=st.one_of(*(st.tuples(st.just(suffix), content, st.just("")) for suffix, content in BYTES.items())))
def test_any_prompt_file_gives_rows_of_text_or_a_line(file: tuple[str, bytes, str]) -> None:
    suffix, content, reason = file
    part = parsers.Part(f"prompts{suffix}", f"prompts{suffix}")
    reading = parsers.read_part(pa.BufferReader(content), part, Columns("question", "answer"))
    tables = used_or_refused(lambda: list(reading), ValueError, reason)
    assert tables is None or not reason
    for row in pa.concat_tables(tables).to_pylist() if tables else []:
        assert row.keys() == {"question", "answer", "messages"} and isinstance(row["answer"], str)
        assert row["messages"] or row["question"].strip()


@pytest.mark.parametrize("bad", [*BAD_PROMPTS[:8], (".txt", JSONL, "expected reasoning_gym:DATASET, hf:NAME, or")])
def test_a_prompt_file_that_ray_reads_is_named(bad: tuple[str, bytes, str], tmp_path: Path, ray_cluster: None) -> None:
    path = tmp_path / f"prompts{bad[0]}"
    path.write_bytes(bad[1])
    named = f"data.source {path}", bad[2]
    assert (
        used_or_refused(lambda: sources.read_rows(str(path), DataConfig(params={}), "data.source"), ConfigError, *named)
        is None
    )
    assert contents(tmp_path) == {str(path): bad[1]}


# --- checkpoints

TENSORS, FIRST = b"tensors", "rank_0.safetensors"
RECORD = FileRecord(bytes=len(TENSORS), sha256="0" * 64)
COUNTED = {"rlx": "0.1.0", "step": 10, "ranks": 1, "tokens": 1000, "cursor": {"epoch": 0, "offset": 8}}
MEASURED = {"metrics": {"kl": math.inf}, "kl": {"coef": 0.005}, "scores": {}, "evaluation": {}, "mlflow_run_id": None}
WRITTEN = Manifest.model_validate(COUNTED | MEASURED | {"config": {"name": "mine"}, "files": {FIRST: RECORD}})


def signed(changes: dict[str, Any]) -> str:
    """A manifest with some of it replaced, and a checksum that is right."""
    content = json.loads(WRITTEN.to_json()) | changes
    del content["sha256"]
    return json.dumps({"sha256": checkpoint_manifest.content_digest(content)} | content)


OUTSIDE = ["../a.safetensors", "/etc/passwd", "x/a.safetensors", "..", "", ".a.safetensors", "a.safetensors\n", "a\0"]
BAD_FIELDS: list[dict[str, Any]] = [{"files": {name: RECORD.model_dump()}} for name in [*OUTSIDE, "b.safetensors"]]
BAD_FIELDS += [{"a\nb": 1}, {"cursor": {"a\nb": None}}, {"cursor": {"\ud800": 0}, "rlx": "\ud800"}, {"format": True}]
BAD_FIELDS += [{"metrics": {"x": "0"}}, {"step": 10**400, "metrics": {"x": 10**400}}]
BAD_MANIFESTS = [f'{{"sha256": "", "format": {nested(depth)}}}' for depth in (900, 970, 980, 990, 5000)]
BAD_MANIFESTS += [*map(signed, BAD_FIELDS), '{"sha256": ' + "9" * 5000 + "}", "\ufeff{}", ""]
CHANGED = st.dictionaries(st.sampled_from([*Manifest.model_fields, ""]), GARBAGE, min_size=1).map(signed) | JSON


@pytest.mark.slow
@examples(120, content=[text.encode() for text in BAD_MANIFESTS])
@given(content=CHANGED.map(str.encode) | damaged(WRITTEN.to_json().encode()) | st.binary(max_size=40))
def test_any_manifest_is_what_was_signed_or_refused(content: bytes, tmp_path: Path) -> None:
    folder, text = tmp_path / "step_000010", content.decode(errors="replace")
    (folder / "x").mkdir(parents=True, exist_ok=True)
    for name in (FIRST, "../a.safetensors", "x/a.safetensors", ".a.safetensors"):
        (folder / name).write_bytes(TENSORS)
    (folder / MANIFEST).write_bytes(content)
    before = contents(tmp_path)
    found = checkpoint_catalog.read_checkpoint(Storage.local(folder))
    assert contents(tmp_path) == before
    manifest = used_or_refused(lambda: Manifest.from_json(text), ValueError, MANIFEST)
    if manifest:
        tree = json.loads(text)
        assert tree.pop("sha256") == checkpoint_manifest.content_digest(tree)
        assert repr(manifest) == repr(Manifest.model_validate(tree))  # == would tell NaN from NaN
    if found.manifest:
        assert repr(found.manifest) == repr(manifest) and set(found.manifest.files) <= {FIRST}
    assert (len(found.problem.splitlines()), len(found.problem) < LONGEST) == (int(not found.manifest), True)


@pytest.mark.parametrize("name", ["", MANIFEST, FIRST])
def test_a_file_in_place_of_a_folder_or_a_folder_in_place_of_a_file_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "step_000010"
    (folder / name).mkdir(parents=True) if name else folder.touch()
    if name == FIRST:
        (folder / MANIFEST).write_text(WRITTEN.to_json())
    (found,) = checkpoint_catalog.list_checkpoints(Storage.local(tmp_path))
    assert not found.manifest and found.problem


SHARDS = [
    {"w": Shard(torch.arange(1.0, 7.0).view(2, 3), (0, 0), (4, 3)), "step": Shard(torch.tensor(3.0), (), ())},
    {"w": Shard(torch.arange(7.0, 13.0).view(2, 3), (2, 0), (4, 3)), "b": Shard(torch.arange(4), (0,), (4,))},
]
SHAPES = {"w": (4, 3), "step": (), "b": (4,)}


def written(shards: dict[str, Shard]) -> bytes:
    with TemporaryDirectory() as folder:
        checkpoint_files.write_shards(shards, Path(folder, "file"))
        return Path(folder, "file").read_bytes()


FILES = [written(shards) for shards in SHARDS]


@contextmanager
def watched(path: str) -> Iterator[Any]:
    """An open file that says when a read leaves it."""
    with fs.LocalFileSystem().open_input_file(path) as file:

        def read_at(count: int, at: int) -> bytes:
            assert (count, at) == (8, 0) or (min(count, at) >= 0 and at + count <= file.size()), (count, at)
            return bytes(file.read_at(count, at))

        yield SimpleNamespace(read_at=read_at, size=file.size)


def unfilled(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """For torch.empty: a value that no file here has, so that what is never filled in is seen."""
    assert math.prod(size) <= 1000, size
    return torch.full(tuple(size), math.nan if dtype.is_floating_point else 99, dtype=dtype)


def all_read(second: bytes, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in full, as the first rank's file and this one say that they are, and in the shapes of a model."""
    places = [Storage(SimpleNamespace(open_input_file=watched), str(folder / f"rank_{rank}")) for rank in range(2)]
    for place, content in zip(places, [FILES[0], second], strict=True):
        Path(place.path).write_bytes(content)
    with pytest.MonkeyPatch.context() as patched, CheckpointReader(places) as parts:
        patched.setattr(torch, "empty", unfilled)
        found = {name: parts.read_full(name) for name in parts.names}
        for name in SHAPES.keys() & found:
            assert parts.read(name, (0,) * len(SHAPES[name]), SHAPES[name], SHAPES[name]).shape == SHAPES[name]
    return found


def with_header(text: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode() + body


Change = tuple[str, str, Any]
BAD_CHANGES: dict[tuple[str, str], list[Any]] = {
    ("w", "data_offsets"): [[-24, 0], [2**60, 2**60 + 24], [0.0, 24.0], [32, 56], [24, 0], [0], "ab", [None, 0]],
    ("w", "shape"): [[-2, -3], [2.0, 3.0], [10**400, 0.5], [6], [2, True, 3], [3, 2], [], None, ["a"]],
    ("w", "dtype"): ["I32", "F8_E4M3", "X", [], None],
    ("w", "whole"): [[4, 4], [2**30, 2**30], [4], [4, 3, 1], [2, 3], "43", None],
    ("w", "offset"): [[0, 0], [1, 0], [3, 0], "20", [2], [2.0, 0], [-2, 0]],
    ("b", "whole"): [[2**60], [3], [-4], [4.0], [[4]]],
}
BAD_HEADERS: list[list[Change]] = [[(*place, value)] for place, values in BAD_CHANGES.items() for value in values]
BAD_HEADERS += [[("b", "whole", [4] + [1] * 99), ("b", "shape", [4] + [1] * 99), ("b", "offset", [0] * 100)]]
COUNTS = st.lists(NUMBERS | st.integers(-4, 24), max_size=3) | st.sampled_from(list(checkpoint_files.DTYPES)) | GARBAGE
KEYS = st.sampled_from(["data_offsets", "shape", "dtype", "whole", "offset"])


@pytest.mark.slow
@examples(100, changes=BAD_HEADERS)
@given(changes=st.lists(st.tuples(st.sampled_from(["w", "b"]), KEYS, COUNTS), min_size=1, max_size=2))
def test_a_header_that_lies_gives_nothing_that_is_not_in_the_files(changes: list[Change], tmp_path: Path) -> None:
    length = int.from_bytes(FILES[1][:8], "little")
    header = json.loads(FILES[1][8 : 8 + length])
    layout = json.loads(header["__metadata__"]["layout"])
    for name, key, value in changes:
        (layout if key in ("offset", "whole") else header)[name]["shape" if key == "whole" else key] = value
    header["__metadata__"]["layout"] = json.dumps(layout)
    content = with_header(json.dumps(header), FILES[1][8 + length :])
    for name, tensor in (used_or_refused(lambda: all_read(content, tmp_path), CheckpointError) or {}).items():
        assert list(tensor.shape) == (layout[name]["shape"] if name in layout else [])
        assert tensor.dtype == torch.bool or not ((tensor != tensor) | (tensor == 99)).any()


BAD_TEXTS = ["{}", "[]", "1", '"a"', "null", "", nested(900), nested(100_000), '{"__metadata__": {}}', '{"w": 1}']
BAD_TEXTS += [json.dumps({"__metadata__": {"layout": text}, "a\nb": {"data_offsets": [0, 0]}}) for text in BAD_TEXTS]
CUT = [FILES[1][:length] for length in range(7, len(FILES[1]), 40)]
BAD_STARTS = [struct.pack("<Q", length) + b"{}" for length in (0, 1, 3, 2**31, 2**60, 2**64 - 1)]


@pytest.mark.slow
@examples(120, content=[*map(with_header, BAD_TEXTS), *BAD_STARTS, b"", b"\0", b"\0" * 8, *CUT])
@given(content=st.binary(max_size=40) | JSON.map(with_header) | damaged(FILES[1]))
def test_a_damaged_file_gives_the_shapes_that_were_written_or_is_refused(content: bytes, tmp_path: Path) -> None:
    found = used_or_refused(lambda: all_read(content, tmp_path), CheckpointError)
    assert found is None or sorted(tuple(tensor.shape) for tensor in found.values()) == sorted(SHAPES.values())


# --- storage

PROFILE = b"address: s3://${RLX_BUCKET:-b}/x?scheme=http\nregion: eu-central-1\nendpoint: https://s3.example.org:9000\n"
BAD_PROFILES = [f"address: {text}" for text in [*UNFIT, *map(nested, (300, 450, 5000))]] + [f"{UNFIT[0]}: 1"]
BAD_PROFILES += ["[address]", "address", "address:", "4", "{address: x, 1: 2, a: 3}", "address: ~no-such-user/x"]
BAD_PROFILES += ["address: s3://[x", 'address: "a\\0b"', 'address: "\\uD800"', 'address: "s3://\\n@x"', 'address: ""']
BAD_PROFILES += ['{address: x, mount: "a\\nb"}', '{address: x, mount: "a\\0b"}', "address: x\nmount: [/]"]
BAD_ADDRESSES = ["s3://[", "s3://a@b", "~no-such-user/x", "a\0b", "\ud800", "minee", "x" * 5000, "s3://\n@", ""]


@pytest.mark.slow
@examples(80, profile=[text.encode() for text in BAD_PROFILES])
@given(profile=damaged(PROFILE) | st.binary(max_size=30) | GARBAGE.map(lambda tree: yaml.safe_dump(tree).encode()))
def test_any_profile_is_an_address_or_refused(profile: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PROFILES", (tmp_path,))
    path = tmp_path / "mine.yaml"
    path.write_bytes(profile)
    address = used_or_refused(lambda: addresses.resolve_address("mine"), StorageError)
    assert address is None or "://" in address or address.startswith("/")
    assert contents(tmp_path) == {str(path): profile}


@examples(60, address=BAD_ADDRESSES)
@given(address=st.text(max_size=12) | st.text(max_size=8).map("s3://".__add__))
def test_any_address_is_resolved_or_refused(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    used_or_refused(lambda: addresses.resolve_address(address), StorageError)
    assert not contents(tmp_path)


# --- what a run keeps beside its checkpoints

GOOD: dict[str, tuple[bytes, Callable[[Storage], Any]]] = {
    "run.json": (b'{"mlflow_run": "0123"}', outbox.run_id),
    "result.json": (
        b'{"step": 40, "eval/accuracy": 0.5}',
        lambda folder: finished_metrics(folder, RunConfig().train.steps),
    ),
    "config.yaml": (SETTINGS, run_folder.saved_config),
}
BAD_RECORDS = [(name, text) for name in GOOD for text in ("", "{}", "null", "[]", "4", "{a", "[[1, 2]]", nested(1100))]
BAD_RECORDS += [("run.json", f'{{"mlflow_run": {value}}}') for value in ("null", "[]", "4", "{}")]
BAD_RECORDS += [("result.json", f'{{"step": {value}}}') for value in ('"x"', "null", "[]", "Infinity", "NaN", "{}")]
BAD_RECORDS += [("result.json", f'{{"step": 40, "eval/accuracy": {value}}}') for value in ('"a"', "null", "[]")]
BAD_RECORDS += [("config.yaml", f"seed: {text}") for text in UNFIT]


@pytest.mark.slow
@examples(100, record=[(name, text.encode()) for name, text in BAD_RECORDS])
@given(record=st.one_of(*(st.tuples(st.just(n), damaged(GOOD[n][0]) | JSON.map(str.encode)) for n in GOOD)))
def test_a_damaged_record_of_a_run_is_named(record: tuple[str, bytes], tmp_path: Path) -> None:
    name, content = record
    for file, (good, _) in GOOD.items():
        (tmp_path / file).write_bytes(content if file == name else good)
    before = contents(tmp_path)
    found = used_or_refused(lambda: GOOD[name][1](Storage.local(tmp_path)), ConfigError, str(tmp_path / name))
    assert contents(tmp_path) == before
    if name == "run.json" and found is not None:
        assert found == str(json.loads(content)["mlflow_run"])
    elif name == "result.json" and found is not None:
        console.metrics_line(found)  # what a resume shows of it
        assert found["step"] >= RunConfig().train.steps


# --- what a sweep keeps

PLAN = plan_content(SweepPlan("s", {"train": {"steps": 4}}, "space.py", candidates=2))
RECORD = {"settings": {"seed": 1}, "state": "open", "reports": [[0, 0.5]], "message": "", "attempts": 1}
ANY_FIELD = {key: GARBAGE for key in PLAN}


@pytest.mark.slow
@examples(120, content=[text.encode() for text in ("", "{}", "null", "[]", "4", "{a", nested(1100))])
@given(
    content=damaged(json.dumps(PLAN).encode())
    | JSON.map(str.encode)
    | st.fixed_dictionaries({}, optional=ANY_FIELD).map(lambda changes: json.dumps(PLAN | changes).encode())
)
def test_any_plan_of_a_sweep_is_used_or_refused(content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "s"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_bytes(content)
    (folder / "space.py").write_text("")
    storage = Storage.local(tmp_path)
    plan = used_or_refused(lambda: plans.saved_sweep(storage, "s", trust=True), ConfigError, str(folder))
    if plan is not None:
        used_or_refused(lambda: plan.config, ConfigError)


@pytest.mark.slow
@examples(80, content=[b"", b"{}", b"null", nested(1100).encode(), b'{"settings": {}, "reports": [[0, "x"]]}'])
@given(content=damaged(json.dumps(RECORD).encode()) | JSON.map(str.encode))
def test_any_record_of_a_trial_is_read_or_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir(exist_ok=True)
    file = tmp_path / "trials" / "trial_00000.json"
    file.write_bytes(content)
    used_or_refused(lambda: TrialRecords(Storage.local(tmp_path)).read("trial_00000"), ConfigError, str(file))


SPACE = b"from ray import tune\n\ndef space():\n    return {'train.ppo_epochs': tune.choice([1, 2])}\n"
BODIES = [
    "sys.exit(0)",
    "os._exit",
    "1 / 0",
    "{1: 2}",
    "{'seed': tune}",
    "{'seed': space}",
    "space()",
    "[[]]",
    "{'a': {}}",
]


@pytest.mark.slow
@examples(100, code=[SPACE.replace(b"{'train.ppo_epochs': tune.choice([1, 2])}", body.encode()) for body in BODIES])
@given(
    code=damaged(SPACE)
    | st.dictionaries(st.sampled_from(setting_keys()) | st.text(max_size=4), GARBAGE, max_size=2).map(
        lambda space: f"from math import inf, nan\n\ndef space():\n    return {space!r}\n".encode()
    )
)
def test_any_search_space_is_used_or_refused(code: bytes, tmp_path: Path) -> None:
    file = tmp_path / "space.py"
    file.write_bytes(b"import os, sys\n" + code)
    used_or_refused(lambda: load_space(str(file), {}), ConfigError, str(file))


# --- what a reward server and a reward function answer

RESPONSES = [Response(Prompt(i, (), f"{i} + 1?", "2"), "2", "2", 1, finished=True) for i in range(2)]
SERVER = JsonServer("url", "http://127.0.0.1:1/score", None, 0, 1.0)


@examples(100, body=[b"", b"{}", b"[]", b'{"scores": [1]}', b'{"scores": [Infinity, 1e999]}', nested(9999).encode()])
@given(body=damaged(b'{"scores": [1.0, 0.5]}') | JSON.map(str.encode) | st.binary(max_size=20))
def test_any_answer_of_a_reward_server_gives_scores_or_a_line(body: bytes) -> None:
    def scores() -> list[float]:
        return scoring.checked("url", RESPONSES, remote.scores_in(SERVER.content(200, body), RESPONSES))

    try:
        found = used_or_refused(scores, RewardError, "reward")
    except TransientError as error:  # it is asked again, and then refused with this text
        assert str(error) and "\n" not in str(error)
        return
    assert found is None or (len(found) == 2 and all(map(math.isfinite, found)))


@examples(100)
@given(returned=GARBAGE)
def test_whatever_a_reward_function_returns_is_scores_or_a_line(returned: Any) -> None:
    found = used_or_refused(lambda: scoring.checked("mine:f", RESPONSES, returned), RewardError, "reward mine:f")
    assert found is None or (len(found) == 2 and all(map(math.isfinite, found)))


# --- chat templates

TEMPLATE = b"{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
BAD_TEMPLATES = [
    "{{",
    "{% for %}",
    "{{ 1 / 0 }}",
    "{{ messages[9]['x'] }}",
    "{{ ''.__class__ }}",
    "{{ raise_exception('no') }}",
]


@examples(80, template=[text.encode() for text in BAD_TEMPLATES])
@given(template=damaged(TEMPLATE) | st.binary(max_size=20))
def test_any_chat_template_gives_tokens_or_a_short_error(template: bytes) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = template.decode(errors="replace")
    try:
        (ids,) = prompts.encode_prompts(tokenizer, ["1 + 1?"], None)
        assert all(isinstance(token, int) for token in ids)
    except (TemplateError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        assert len(str(error)) < LONGEST  # `tokenize_rows` makes one line of it, which names the model
