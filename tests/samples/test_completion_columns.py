"""What is kept of a completion, by hand; the text of each token; which prompts are kept."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sample_cases import Bytes, Letters, Words, step

from rlx.samples.columns import COLUMNS, CompletionFile, Kind, as_table, is_kept
from rlx.samples.token_texts import TokenTexts
from rlx.types import Episode, Observation, Turn


def test_the_columns_by_hand() -> None:
    table = as_table(step(), TokenTexts(Letters()))
    assert table.column_names == [*COLUMNS.names, "reward/task", "reward/length"]
    assert table.select(COLUMNS.names).schema.types == COLUMNS.types
    first, second, third, last = table.to_pylist()
    assert first == {
        "step": 5,
        "kind": "training",
        "prompt_index": 2,
        "group": 10,
        "source": None,
        "sample": 0,
        "trained": True,
        "question": "question 0",
        "expected": "yes",
        "prompt": "?!",
        "completion": "text",
        "answer": None,
        "score": 0.0,
        "correct": False,
        "finish": "stop",
        "version": 4,
        "staleness": 0,
        "token_ids": [97],
        "tokens": ["a"],
        "engine_logprobs": [-0.5],
        "logprobs": [0.0],
        "ratios": [pytest.approx(2, abs=1e-5)],
        "advantages": [0.0],
        "turns": None,
        "episode": None,
        "reward/task": 0.0,
        "reward/length": -1.0,
    }
    assert [row["trained"] for row in (first, second, third, last)] == [True, False, True, False]
    assert (second["ratios"], second["advantages"], second["logprobs"]) == (None, [1.5, 2.0], [-3.0, -4.0])
    assert (third["finish"], third["staleness"], third["version"], third["prompt_index"]) == ("length", 1, 3, 3)
    assert third["ratios"] == pytest.approx([2, 2, 2], abs=1e-5)
    assert (last["correct"], last["trained"], last["logprobs"], last["advantages"]) == (True, False, None, None)
    assert last["engine_logprobs"] == [-3.5, -3.5]


def test_an_episode_has_the_turn_of_each_token_and_what_the_environment_said() -> None:
    said = Observation(({"role": "tool", "content": "4"},), reward=0.5, calls=1)
    told = Episode(Observation(), (Turn(0, 1, 4, said), Turn(2, 3, 4, Observation(done=True))), (), 0.5)
    given = step()
    first = replace(given.rows[0].completion, token_ids=(97, 98, 99), logprobs=(-0.5, 0.0, -1.0), episode=told)
    rows = [replace(given.rows[0], completion=first), *given.rows[1:]]
    (row, *_) = as_table(replace(given, rows=rows, trained=None), TokenTexts(Letters())).to_pylist()
    assert (row["turns"], row["tokens"]) == ([0, -1, 1], ["a", "b", "c"])
    assert Episode.of_json(row["episode"]) == told


def test_an_evaluation_has_no_numbers_of_training() -> None:
    rows = as_table(step(4, Kind.HELD_OUT, trained=0), TokenTexts(Letters())).to_pylist()
    assert {row["kind"] for row in rows} == {"held_out"} and not any(row["trained"] for row in rows)
    assert [row["staleness"] for row in rows] == [0, 0, 1, 1]  # the weights of step 4 answer
    assert {row["ratios"] for row in rows} == {None}


def test_the_chosen_rows_keep_their_numbers() -> None:
    trained = step().trained
    assert trained
    chosen = trained.rows([0, 2, 3])  # the last was not trained on
    assert chosen.advantages.tolist() == [[0.0, 0.5, 1.0], [3.0, 3.5, 4.0]]
    assert np.array_equal(chosen.newest_logprobs, trained.newest_logprobs[[0, 2]], equal_nan=True)
    assert chosen.in_losses.tolist() == [1, 1]


def test_a_file_name_tells_what_is_in_it() -> None:
    for kind, text in ((Kind.TRAINING, "step_000012-00001-of-00002.parquet"), (Kind.HELD_OUT, "held_out_1234567-")):
        name = CompletionFile(12 if kind == Kind.TRAINING else 1234567, kind, 1, 2)
        assert str(name).startswith(text) and CompletionFile.of(str(name)) == name
    others = ("step_12-00001-of-00002.parquet", "step_000012-00001-of-00002.parquet.7.part", "x.parquet")
    assert [CompletionFile.of(each) for each in others] == [None, None, None]


def test_the_share_is_a_function_of_seed_step_and_prompt() -> None:
    kept = [is_kept(0.25, 0, 3, prompt) for prompt in range(4000)]
    assert kept == [is_kept(0.25, 0, 3, prompt) for prompt in range(4000)]
    assert sum(kept) / 4000 == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 4000))
    for seed, number in ((1, 3), (0, 4)):
        assert kept != [is_kept(0.25, seed, number, prompt) for prompt in range(4000)]
    assert all(is_kept(0.5, 0, 3, prompt) for prompt in range(4000) if kept[prompt])  # a larger share has them too
    assert [is_kept(share, 0, 0, 0) for share in (0.0, 1.0)] == [False, True]


def test_tokens_of_one_character_have_its_text_once() -> None:
    ids = "aé€x".encode()
    texts = TokenTexts(Bytes())
    assert texts.each(list(ids)) == ["a", "é", "", "€", "", "", "x"]
    assert texts.each(list(ids[:2])) == ["a", "\ufffd"]  # cut within a character
    assert texts.each([0xFF, 97]) == ["\ufffd", "a"]


def test_each_token_is_decoded_once() -> None:
    tokenizer = Bytes()
    texts = TokenTexts(tokenizer)
    texts.each([97, 98, 97])
    calls = tokenizer.calls
    assert texts.each([98, 97, 98]) == ["b", "a", "b"] and tokenizer.calls == calls


def test_the_space_before_a_word_is_kept() -> None:
    texts = TokenTexts(Words())
    assert texts.each([1, 2, 3]) == [" b", " c", "d"]
    assert texts.whole([1, 2]) == "b c"
