"""The classifier's token ids and scores, and the actors around it, on small models with random heads."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig
from rlx.models.tiny import build_tokenizer
from rlx.rewards.reward_model import (
    Exchange,
    ModelReward,
    RewardModel,
    RewardModelError,
    encode_response,
    load_classifier,
    start_reward_models,
    token_batches,
)
from rlx.runs.preflight import check_rewards
from rlx.types import Prompt, Response

PAIRS = [Exchange(f"{'what is ' * (i % 7)}{i} + 1 =", "9" * (1 + i * 5 % 11)) for i in range(40)]
PATIENCE = 300.0  # for loading, on a busy machine


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Path:
    """Reads a score off the last token; the padding token must not be taken for it."""
    return classifier_at(tiny_model.with_name("decoder"), tiny_model)


@pytest.fixture(scope="module")
def encoder(tiny_model: Path) -> Path:
    """Looks both ways: padding must be masked. It has no chat template."""
    folder, tokenizer = tiny_model.with_name("encoder"), build_tokenizer()
    tokenizer.chat_template = None
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.3, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def classifier_at(folder: Path, base: Path, labels: int = 1) -> Path:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


# --- token ids


@pytest.mark.parametrize(
    ("template", "system", "text"),
    [
        ("as it is", None, "<|user|>1 + 2 =<|assistant|>3<|end|>"),
        ("as it is", "be kind", "<|system|>be kind<|user|>1 + 2 =<|assistant|>3<|end|>"),
        (None, None, "1 + 2 =3<|end|>"),
        (None, "be kind", "be kind\n\n1 + 2 =3<|end|>"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None, "1 + 2 =3<|end|>"),
        (
            "{% for m in messages %}{{ m['content'] + eos_token + '\n' }}{% endfor %}",
            None,
            "1 + 2 =<|end|>\n3<|end|>\n",
        ),
    ],
)
def test_the_chat_is_encoded_with_one_end(template: str | None, system: str | None, text: str) -> None:
    tokenizer = build_tokenizer()
    if template != "as it is":
        tokenizer.chat_template = template
    assert tokenizer.decode(encode_response(tokenizer, Exchange("1 + 2 =", "3"), system)) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("as it is", "<|user|>1 + 2 =<|assistant|>3"),
        (None, "1 + 2 =3"),
        ("{% for m in messages %}{{ m['content'] + eos_token + '\n' }}{% endfor %}", "1 + 2 =<|end|>\n3"),
        ("{% for m in messages %}{{ m['content'] + '(turn)' }}{% endfor %}", "1 + 2 =(turn)3"),
        # A template that changes what was said cannot leave it open: only the end is taken off.
        ("{% for m in messages %}{{ m['content'][:1] + eos_token }}{% endfor %}", "1<|end|>3"),
    ],
)
def test_a_completion_that_was_cut_has_no_end(template: str | None, text: str) -> None:
    tokenizer = build_tokenizer()
    if template != "as it is":
        tokenizer.chat_template = template
    assert tokenizer.decode(encode_response(tokenizer, Exchange("1 + 2 =", "3", finished=False))) == text


def test_a_reward_model_sees_whether_a_completion_was_cut(decoder: Path) -> None:
    whole, cut = RewardModel(str(decoder)).score([Exchange("1 + 2 =", "3"), Exchange("1 + 2 =", "3", finished=False)])
    assert abs(whole - cut) > 1e-3


def test_long_texts_are_cut_on_the_left_behind_the_first_token(decoder: Path) -> None:
    classifier = load_classifier(str(decoder))
    short, long, other = classifier.encode(
        [Exchange("q", "a"), Exchange("b" + "q" * 600, "a"), Exchange("c" + "q" * 600, "a")]
    )
    assert classifier.tokenizer.decode(short) == "<|user|>q<|assistant|>a<|end|>"
    assert len(long) == 512
    assert classifier.tokenizer.decode(long) == "<|user|>" + "q" * 508 + "<|assistant|>a<|end|>"
    assert long == other


# --- scores


def test_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = [random.Random(i).randint(1, 30) for i in range(100)] + [200]
    batches = list(token_batches(lengths, 100))
    assert sorted(i for batch in batches for i in batch) == list(range(101))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 100 for batch in batches[:-1])
    assert batches[-1] == [100]
    assert len(batches) < 25  # 101 rows of 15.5 tokens fill 16


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_score_does_not_depend_on_batch_padding_or_order(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        alone = [model(torch.tensor([encode_response(tokenizer, pair)])).logits.item() for pair in PAIRS]
    assert max(alone) - min(alone) > 0.1
    for budget in (1, 300, 100_000):
        assert RewardModel(str(folder), batch_tokens=budget).score(PAIRS) == pytest.approx(alone, abs=1e-5)
    backwards = RewardModel(str(folder), batch_tokens=300).score(PAIRS[::-1])
    assert backwards[::-1] == pytest.approx(alone, abs=1e-5)


def test_a_tokenizer_without_padding_pads_with_the_end(decoder: Path) -> None:
    folder = decoder.with_name("no-padding")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(decoder), build_tokenizer()
    model.config.pad_token_id = tokenizer.pad_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    one_by_one = RewardModel(str(folder), batch_tokens=1).score(PAIRS)
    assert RewardModel(str(folder)).score(PAIRS) == pytest.approx(one_by_one, abs=1e-5)


def test_the_system_message_counts(decoder: Path) -> None:
    assert RewardModel(str(decoder), system="be kind").score(PAIRS) != RewardModel(str(decoder)).score(PAIRS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "no such folder, nor a model on the hub"),
        ("tied", "not a sequence classifier, it lacks score.weight"),
        ("three", "its classifier has 3 labels, expected 1"),
        ("empty", "Unrecognized model in "),
    ],
)
def test_what_is_no_reward_model_is_refused(tiny_model: Path, name: str, reason: str) -> None:
    folder = tiny_model.with_name(name)
    if name == "three":
        classifier_at(folder, tiny_model, labels=3)
    if name == "empty":
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        load_classifier(str(folder))
    assert str(error.value).startswith(f"reward.model {folder}: {reason}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tied", "not a sequence classifier, its weights have no layer that scores"),
        ("three", "its classifier has 3 labels, expected 1"),
        ("two", "its classifier has 2 labels, expected 1"),  # which config.json does not say
        ("bare", "it has no tokenizer (tokenizer.json): tokenizer.save_pretrained writes it"),
    ],
)
def test_what_is_no_reward_model_is_refused_before_anything_starts(
    tiny_model: Path, decoder: Path, encoder: Path, name: str, reason: str
) -> None:
    folder = tiny_model.with_name(name)
    if name in ("two", "three"):
        classifier_at(folder, tiny_model, labels=2 if name == "two" else 3)
    if name == "bare":
        AutoModelForSequenceClassification.from_pretrained(decoder).save_pretrained(folder)
    for good in (decoder, encoder):
        check_rewards(RewardConfig(functions={"model": 1}, model=str(good)))
    with pytest.raises(ConfigError) as error:
        check_rewards(RewardConfig(functions={"model": 1}, model=str(folder)))
    assert str(error.value) == f"reward.model {folder}: {reason}"


# --- actors


@pytest.fixture(scope="module")
def replicas(ray_cluster: None, decoder: Path) -> Iterator[list[Any]]:
    yield from started(str(decoder), 2)


def started(model: str, count: int) -> Iterator[list[Any]]:
    group = placement_group([{"CPU": 0.5}] * count)
    actors = start_reward_models(model, {"CPU": 0.5}, group, range(count), batch_tokens=300)
    yield actors
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)


def responses(answers: list[Exchange]) -> list[Response]:
    return [
        Response(Prompt(i, (), question, ""), text=text, answer=text, num_tokens=1, finished=finished)
        for i, (question, text, finished) in enumerate(answers)
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_replicas_share_the_responses_in_order(replicas: list[Any], decoder: Path, first: int) -> None:
    reward = ModelReward(replicas, PATIENCE, first)
    expected = RewardModel(str(decoder)).score(PAIRS)
    assert reward(responses(PAIRS)) == pytest.approx(expected, abs=1e-5)
    assert reward(responses(PAIRS[:1])) == pytest.approx(expected[:1], abs=1e-5)
    cut = PAIRS[0]._replace(finished=False)
    assert reward(responses([cut])) == pytest.approx(RewardModel(str(decoder)).score([cut]), abs=1e-5)
    assert reward([]) == []


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_nearly_equal_in_characters(count: int) -> None:
    pairs = [*PAIRS, Exchange("q", "long " * 40)]
    shares = ModelReward([None] * count).shares(responses(pairs))
    assert [response.text for share in shares for response in share] == [pair.completion for pair in pairs]
    sizes = [sum(len(response.prompt.question) + len(response.text) + 1 for response in share) for share in shares]
    assert max(sizes) - sum(sizes) / count <= 202  # of the longest


@pytest.mark.slow  # kills things
def test_a_killed_replica_is_asked_again_when_it_is_back(replicas: list[Any]) -> None:
    reward = ModelReward(replicas, PATIENCE)
    before = reward(responses(PAIRS))
    ray.kill(replicas[1], no_restart=False)
    assert reward(responses(PAIRS)) == before


@pytest.mark.slow
def test_an_error_names_the_replica_that_is_late(replicas: list[Any]) -> None:
    long = responses([Exchange("q" * 500, "a")] * 400)
    with pytest.raises(RewardModelError, match=r"^reward model 1 did not answer within 0.01 s$"):
        ModelReward(replicas, 0.01, first=1)(long)
    assert ModelReward(replicas, PATIENCE)([]) == []


def test_a_failing_replica_is_named_with_the_reason(replicas: list[Any]) -> None:
    with pytest.raises(RewardModelError, match=r"^reward model 1 failed: [^\n]+$"):
        ModelReward(replicas, PATIENCE)(responses([*PAIRS, Exchange("q", "half a character: \ud800")]))


@pytest.mark.slow
def test_a_replica_that_is_gone_is_named(ray_cluster: None, decoder: Path) -> None:
    for actors in started(str(decoder), 1):
        reward = ModelReward(actors, PATIENCE)
        reward([])
        ray.kill(actors[0])
        with pytest.raises(RewardModelError, match=r"^reward model 0 died: .+$"):
            reward(responses(PAIRS))


def test_a_model_that_does_not_score_is_an_error_of_the_settings(ray_cluster: None, tiny_model: Path) -> None:
    """Such an error ends a run; a dead actor would have the workers restarted."""
    for actors in started(str(tiny_model), 1):
        with pytest.raises(ConfigError, match=r"^reward\.model .*tied: not a sequence classifier, it lacks"):
            ModelReward(actors, PATIENCE)([])
