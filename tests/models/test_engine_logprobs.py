"""The distribution that sampling options make, against values computed by hand; test_engine compares it with vLLM."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlx.models import tiny
from rlx.models.engine_logprobs import EngineScorer, bad_word_tokens, engine_logits
from rlx.models.policy import ResponseTokens
from rlx.types import Sampling

PLAIN = Sampling(1.0, 1.0, -1, 10, (3,))
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])
NONE = torch.tensor([], dtype=torch.int64)
P = [math.exp(value) / sum(map(math.exp, (2, 1, 0, -1))) for value in (2, 1, 0, -1)]  # 0.6439, 0.2369, 0.0871, 0.0321


def altered(prompt: Tensor = NONE, drawn: Tensor = NONE, bad: Any = (), **options: Any) -> list[float]:
    sampling = Sampling(**{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__} | options)
    return engine_logits(LOGITS, prompt, drawn, sampling, bad).tolist()


INF = math.inf
CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [2, 1, 0, -1]),
    ({"temperature": 0.5}, [4, 2, 0, -2]),
    ({"min_p": 0.3}, [2, 1, -INF, -INF]),  # at least 0.3 x 0.6439 = 0.1932
    ({"min_p": 0.04}, [2, 1, 0, -1]),
    ({"top_k": 2}, [2, 1, -INF, -INF]),
    ({"top_p": 0.8}, [2, 1, -INF, -INF]),  # 0.0871 + 0.0321 <= 0.2 < that + 0.2369
    ({"top_p": 0.01}, [2, -INF, -INF, -INF]),
    ({"min_tokens": 1}, [2, 1, 0, -INF]),
    ({"options": (("allowed_token_ids", [1, 3]), ("logit_bias", {"1": 0.5}))}, [-INF, 1.5, -INF, -1]),
]


@pytest.mark.parametrize(("options", "expected"), CASES, ids=lambda each: str(each)[:30])
def test_logits_of_the_first_token(options: dict[str, Any], expected: list[float]) -> None:
    assert pytest.approx([0.6439, 0.2369, 0.0871, 0.0321], abs=1e-4) == P
    assert altered(**options) == pytest.approx(expected, abs=1e-6)


def test_penalties_count_the_response_and_repetition_the_prompt_too() -> None:
    prompt, drawn = torch.tensor([1]), torch.tensor([0, 3, 0])
    assert altered(prompt, drawn, repetition_penalty=2.0) == pytest.approx([1, 0.5, 0, -2])
    assert altered(prompt, drawn, frequency_penalty=0.5) == pytest.approx([1, 1, 0, -1.5])
    assert altered(prompt, drawn, presence_penalty=0.5) == pytest.approx([1.5, 1, 0, -1.5])
    assert altered(prompt, drawn, repetition_penalty=2.0, temperature=0.5) == pytest.approx([2, 1, 0, -4])


def test_the_last_token_of_a_bad_word_is_excluded_after_its_first_ones() -> None:
    assert altered(bad=[[0]]) == [-INF, 1, 0, -1]
    assert altered(drawn=torch.tensor([1, 2]), bad=[[2, 0], [1, 1]]) == [-INF, 1, 0, -1]
    assert altered(drawn=torch.tensor([2]), bad=[[1, 2, 0]]) == [2, 1, 0, -1]


def test_no_stop_token_comes_before_the_shortest_length() -> None:
    assert altered(drawn=torch.tensor([0]), min_tokens=2)[3] == -INF
    assert altered(drawn=torch.tensor([0, 0]), min_tokens=2)[3] == -1


def test_an_option_that_is_not_known_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match=r"sampling_options\.thinking_token_budget: rlx cannot compute"):
        altered(options=(("thinking_token_budget", 5),))


def test_tokens_are_scored_in_chunks_with_what_came_before_each() -> None:
    ids = torch.tensor([[5, 0, 3, 0, 0], [1, 2, 0, 1, 1]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1.0, 1, 0, 0]])
    tokens = ResponseTokens.of(ids, torch.tensor([1, 3]), mask)
    sampling = Sampling(1.0, 1.0, -1, 10, (3,), frequency_penalty=1.0)
    scorer = EngineScorer(tokens, torch.tensor([1, 3]), sampling, [])
    logits = torch.tensor([[2.0, 1, 0, -1, 0, 0]]).expand(5, -1)
    first, _ = scorer(logits[:2], tokens.targets[:2], 1.0, False)
    rest, entropy = scorer(logits[2:], tokens.targets[2:], 1.0, False)
    total = math.log(math.exp(2) + math.exp(1) + 3 + math.exp(-1))

    def after(*counted: int) -> float:
        penalized = [2.0, 1, 0, -1, 0, 0]
        for token in counted:
            penalized[token] -= 1
        return math.log(sum(map(math.exp, penalized)))

    expected = [2 - total, -1 - after(0), 1 - after(0, 3), 1 - total, 0 - after(1)]
    assert [*first.tolist(), *rest.tolist()] == pytest.approx(expected, abs=1e-6)
    assert entropy is None
    # Two neighbours have three tokens each, the last of the second once more.
    places = torch.tensor([3, 4, 4])
    second = EngineScorer(tokens, torch.tensor([1, 3]), sampling, [], first=3)
    shared, _ = second(logits[:3], tokens.targets[places], 1.0, False)
    assert shared.tolist() == pytest.approx([expected[3], expected[4], expected[4]], abs=1e-6)


def test_a_bad_word_is_banned_at_the_start_and_after_a_blank() -> None:
    tokenizer = tiny.build_tokenizer()
    one, blank = (tokenizer(text, add_special_tokens=False).input_ids for text in ("1", " "))
    assert bad_word_tokens(tokenizer, ["1", "1 "]) == [one, one + blank]  # with a blank they have more tokens
