"""Hugging Face data sets: the syntax of their addresses, and folders that `save_to_disk` wrote."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rlx.config.errors import ConfigError
from rlx.config.sections.data import DataConfig, EvalConfig, label_of
from rlx.config.sections.reward import RewardConfig
from rlx.data import sources
from rlx.data.stored import hub
from rlx.data.stored.hub import HubAddress
from rlx.rewards.scoring import answer_check

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("ray_cluster")

CHECK_TESTS = answer_check(RewardConfig(functions={"code": 1.0}))
FILES = DataConfig(source="prompts.csv", params={})


def rows(count: int, prefix: str = "q") -> Any:
    columns = {"question": [f"{prefix}{i}" for i in range(count)], "answer": list(range(count)), "more": [None] * count}
    return datasets.Dataset.from_dict(columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with two splits."""
    path = tmp_path_factory.mktemp("hub") / "splits"
    datasets.DatasetDict({"train": rows(30), "test": rows(5, "t")}).save_to_disk(path)
    return path


def read(address: str) -> list[dict[str, str]]:
    return sources.read_rows(address, FILES, "data.source").take_all()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("hf:gsm8k", ("gsm8k", None, "")),
        ("hf:openai/gsm8k", ("openai/gsm8k", None, "")),
        ("hf:openai/gsm8k@test", ("openai/gsm8k", None, "test")),
        ("hf:openai/gsm8k/main@train[:10%]", ("openai/gsm8k", "main", "train[:10%]")),
    ],
)
def test_names_with_config_and_split(address: str, expected: tuple[str, str | None, str]) -> None:
    assert HubAddress.parse(address) == HubAddress(*expected, is_folder=False)
    assert sources.resolve(address) == address and not sources.find_source(address).is_generated


@pytest.mark.parametrize("address", ["hf:", "hf:a//b", "hf:a/b/c/d", "hf:@train"])
def test_a_malformed_name_is_refused_with_the_syntax(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"^eval\.source {address}: expected hf:NAME, hf:ORGANIZATION/NAME/CONFIG@S"):
        sources.check_source(address, FILES, "eval.source")


def test_a_named_data_set_is_loaded_with_its_config_and_split(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked = []

    def load(*names: str | None, split: str) -> Any:
        asked.append((*names, split))
        return datasets.load_from_disk(folder)["test"]

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = read("hf:openai/gsm8k/main@test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert found == [{"question": f"t{i}", "answer": str(i), "messages": None} for i in range(5)]


def test_an_error_of_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: str | None, split: str) -> Any:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigError, match=r"^data\.source hf:a/b: no network$"):
        read("hf:a/b")


def test_a_saved_data_set_with_and_without_splits(folder: Path, tmp_path: Path) -> None:
    expected = [{"question": f"q{i}", "answer": str(i), "messages": None} for i in range(30)]
    assert read(str(folder)) == read(f"hf:{folder}") == read(f"hf:{folder}@train") == expected
    assert [row["question"] for row in read(f"hf:{folder}@test")] == [f"t{i}" for i in range(5)]
    rows(3).save_to_disk(tmp_path / "alone")
    assert read(str(tmp_path / "alone")) == expected[:3]


def test_a_saved_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"question": [], "answer": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"/empty: there are no rows in it$"):
        read(str(tmp_path / "empty"))


def test_rows_that_were_chosen_and_sorted_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(40).select([7, 3, 30, 1]).save_to_disk(tmp_path / "chosen")
    monkeypatch.setattr(hub, "_PIECE_ROWS", 3)
    assert [row["answer"] for row in read(str(tmp_path / "chosen"))] == ["7", "3", "30", "1"]


def test_the_last_rows_are_held_out(folder: Path) -> None:
    data = DataConfig(source=str(folder), params={})
    training, held_out = sources.training_and_held_out_rows(data, EvalConfig(num_prompts=2))
    assert not isinstance(training, list) and not isinstance(held_out, list)
    assert (training.count(), [row["answer"] for row in held_out.take_all()]) == (28, ["28", "29"])


def test_a_relative_folder_is_resolved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert sources.resolve("hf:splits@test") == f"hf:{folder}@test"
    assert sources.resolve("splits") == f"hf:{folder}"


def test_a_folder_may_begin_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert sources.resolve("hf:~/splits@test") == f"hf:{folder}@test"
    assert HubAddress.parse("hf:~/splits@test") == HubAddress(str(folder), None, "test", True)


def test_the_path_of_a_folder_may_have_the_sign_before_a_split(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shutil.copytree(folder, tmp_path / "me@corp" / "ds@v2")
    monkeypatch.chdir(place.parent)
    for name in ("ds@v2", f"{place}"):
        assert sources.resolve(f"hf:{name}") == sources.resolve(name) == f"hf:{place}"
        assert sources.resolve(f"hf:{name}@test") == f"hf:{place}@test"
    assert HubAddress.parse(f"hf:{place}") == HubAddress(str(place), None, "", True)
    assert len(read(f"hf:{place}")) == 30 and len(read(f"hf:{place}@test")) == 5
    assert label_of(f"hf:{tmp_path}/me@corp/ds@test") == label_of(f"{tmp_path}/me@corp/ds.jsonl") == "ds"


def test_a_folder_with_one_split_alone_is_read_whatever_name_it_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = datasets.Dataset.from_dict({"question": ["q", "p"], "answer": ["1", "2"]}, split="train")
    both.train_test_split(1)["test"].save_to_disk(tmp_path / "part")
    datasets.Dataset.from_dict(both.to_dict(), split="train[:50%]").save_to_disk(tmp_path / "half")
    rows(3).save_to_disk(tmp_path / "none")
    assert len(read(f"hf:{tmp_path}/none@train")) == len(read(f"hf:{tmp_path}/none@test")) == 3
    assert len(read(f"hf:{tmp_path}/half@train")) == len(read(f"hf:{tmp_path}/half@train[:50%]")) == 2
    assert len(read(f"hf:{tmp_path}/part@train")) == len(read(f"hf:{tmp_path}/part")) == 1
    assert not caplog.messages
    assert len(read(f"hf:{tmp_path}/part@test")) == 1
    assert caplog.messages == [f"{tmp_path}/part: the folder has one split alone, and says 'train', not 'test'"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf:{}@tset", "no split 'tset', it has train, test; nearest: test"),
        ("hf:{}/train/gone", "is no folder that Dataset.save_to_disk wrote"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(folder: Path, address: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(address.format(folder))
    assert str(refused.value).startswith(f"data.source {address.format(folder)}: ") and message in str(refused.value)


def test_a_missing_column_or_answer_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"splits: no column 'Question', it has question, answer, more; nearest: ques"
    ):
        sources.read_rows(str(folder), FILES.model_copy(update={"prompt_column": "Question"}), "data.source")
    with pytest.raises(ConfigError, match=r"splits: row 1: the answer to 'q0' is None, expected text or a number$"):
        sources.read_rows(str(folder), FILES.model_copy(update={"answer_column": "more"}), "data.source")


def test_malformed_unit_tests_are_refused_with_the_number_of_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_PIECE_ROWS", 16)
    answers = ["assert f(1) == 2"] * 60
    answers[40] = "assert f(1 == 2"
    datasets.Dataset.from_dict({"question": ["q"] * 60, "answer": answers}).save_to_disk(tmp_path / "set")
    with pytest.raises(
        ConfigError, match=r"set: row 41: reward code: the answer holds no tests: '\(' was never closed"
    ):
        sources.read_rows(str(tmp_path / "set"), FILES, "data.source", CHECK_TESTS)


def test_an_empty_data_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: rows(0))
    with pytest.raises(ConfigError, match=r"^data\.source hf:a: there are no rows in it"):
        read("hf:a")


def test_a_data_set_that_the_hub_would_have_to_give_is_refused_at_once_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^data\.source hf:a/b/c: the Hugging Face hub does not answer \(Con"):
        sources.check_source("hf:a/b/c", FILES, "data.source")
    (tmp_path / "a___b").mkdir()
    sources.check_source("hf:a/b/c", FILES, "data.source")  # it was downloaded before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^data\.source hf:b: it is not in the cache .*, and HF_HUB_OFFLINE is set$"):
        sources.check_source("hf:b", FILES, "data.source")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^data\.source hf:a: needs the package datasets: pip install 'rlx\[hf\]'$"):
        sources.check_source("hf:a", FILES, "data.source")


def test_conversations_and_nested_answers_as_verl_stores_them(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    columns = {"prompt": [prompt], "reward_model": [{"ground_truth": "2", "style": "rule"}], "data_source": ["sums"]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
    named = FILES.model_copy(update={"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"})
    (row,) = sources.read_rows(str(tmp_path / "set"), named, "data.source").take_all()
    assert row == {"question": "1 + 1?", "answer": "2", "messages": prompt}
    wrong = named.model_copy(update={"answer_column": "reward_model.ground_trut"})
    with pytest.raises(ConfigError, match=r"no entry 'ground_trut', it has ground_truth, style; nearest: ground_truth"):
        sources.read_rows(str(tmp_path / "set"), wrong, "data.source")
    with pytest.raises(ConfigError, match=r"no column 'model\.truth', it has prompt, reward_model, data_source"):
        wrong = named.model_copy(update={"answer_column": "model.truth"})
        sources.read_rows(str(tmp_path / "set"), wrong, "data.source")
