"""The tiny model's folder, its tokenizer and its recipe, on a recipe of two steps."""

import os
import shutil
import string
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.models import tiny
from rlx.models.tiny import WarmStart, atomic_folder, make_tiny_model

SHORT = WarmStart(right_steps=1, careless_steps=1, batch=8, held_out_size=32, hidden=64, mlp=64, heads=2, kv_heads=1)
QUESTION = "State the final answer to the following arithmetic problem: 4 - 1 + 7 ="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "tiny"
    make_tiny_model(path, recipe=SHORT)
    return path


def test_folder_loads_and_stops_at_the_end_of_the_turn(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (folder / "warm_start.json").is_file()


@pytest.mark.parametrize("text", [string.printable[:95] + "\n", "a  b\n\nc ", QUESTION, "1 + 2 =3"])
def test_printable_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_character_is_one_unknown_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before, unknown, after = tokenizer.encode("aéb")
    assert unknown == tokenizer.unk_token_id
    assert tokenizer.decode([before, after]) == "ab"


def test_chat_prompt_is_short_and_ends_with_the_assistant_marker(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids[-1] == tokenizer.convert_tokens_to_ids(tiny.ASSISTANT)
    assert len(ids) == 9
    spoken = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "10"}], return_dict=False)
    assert spoken == [*ids, *tokenizer.encode("10"), tokenizer.eos_token_id]


def test_same_recipe_same_weights_and_the_callers_state_is_kept(folder: Path, tmp_path: Path) -> None:
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    seen: list[tuple[int, int]] = []
    make_tiny_model(tmp_path / "again", lambda done, steps, _: seen.append((done, steps)), SHORT)
    make_tiny_model(tmp_path / "other", recipe=replace(SHORT, seed=1))
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights
    assert seen == [(1, 2), (2, 2)]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_real_recipe_has_a_million_parameters() -> None:
    model = tiny.build_model(WarmStart(), tiny.build_tokenizer())
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 1_500_000
    assert model.config.head_dim in (32, 64, 80, 96, 112, 128)


def test_held_out_questions_are_not_practised() -> None:
    recipe = WarmStart(right_steps=60, careless_steps=4)
    held_out = {text for text, _ in tiny.draw_questions(recipe, recipe.held_out_seed, recipe.held_out_size)}
    practised = tiny.practice_questions(recipe)
    assert len(practised) == 64 * recipe.batch
    assert held_out.isdisjoint(text for text, _ in practised)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        make_tiny_model(tmp_path / "tiny", recipe=SHORT)
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_that_make_the_model_the_later_takes_what_is_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = tmp_path / "tiny", os.rename

    def overtaken(source: Path, target: Path) -> None:
        shutil.copytree(folder, target)
        rename(source, target)

    monkeypatch.setattr("os.rename", overtaken)
    make_tiny_model(place, recipe=SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert sorted(path.name for path in place.iterdir()) == sorted(path.name for path in folder.iterdir())


def test_a_folder_that_is_not_the_same_for_all_is_not_mistaken_for_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("another's")
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "mine") as unfinished:
        (unfinished / "file").write_text("mine")
    assert (tmp_path / "mine" / "file").read_text() == "another's"
