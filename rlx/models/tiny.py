"""Makes the tiny language model of rlx: a small Llama that has partly learnt short sums.

The model is trained from random weights, once, on two cores, and always to the same weights on one machine, so that a
sweep needs no download. It learns `chain_sum` of reasoning-gym with three one-digit terms, in two stages. First it
copies correct answers until it solves most sums. Then it copies a careless demonstrator: in most sums with a minus
sign the last digit is one too high. The wrong answer becomes the most likely one for these sums, and the correct answer
keeps a considerable probability. So reinforcement learning on this model mostly elicits a skill that the model was
taught. It does not show that a reward alone teaches arithmetic to a model that has not learnt it.

The completion is the bare answer and the end-of-turn token. Held-out questions are never in the practice set.
A second recipe, `CALCULATING`, has sums of three numbers with three digits, which the model cannot do by itself. It has
seen answers without help, most of which are beyond it, and in a part of the sums a call of a calculator and its result.
Left out: any other task, resuming a stopped training, and the questions of reinforcement learning itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import string
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

PAD, END, UNKNOWN, ASSISTANT = "<|pad|>", "<|end|>", "<|unknown|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, UNKNOWN, "<|system|>", "<|user|>", ASSISTANT)
# One token each, because every question has them: a prompt of 10 tokens costs a seventh of one of 70.
PHRASES = ("State the final answer to the following arithmetic problem: ", " + ", " - ", " =")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL = "<|tool|>"
CALL = ('<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>')
"""what is before and after the expression in a call of the calculator; one token each"""
TOOL_TEMPLATE = "{% for tool in tools or [] %}{{ '<|system|>' + tool['function']['name'] }}{% endfor %}" + CHAT_TEMPLATE
CONTEXT_LENGTH = 512
IGNORED = -100  # the label that cross_entropy skips

Progress = Callable[[int, int, float], None]
"""called after each step with the steps done, all steps and the loss"""
Question = tuple[str, str]
"""(text, correct answer)"""


@dataclass(frozen=True)
class WarmStart:
    """The recipe; the defaults make the model of rlx. Steps are optimizer steps of `batch` questions."""

    min_terms: int = 3
    max_terms: int = 3
    min_digits: int = 1
    max_digits: int = 1
    held_out_seed: int = 10_000_000
    held_out_size: int = 256
    practice_seed: int = 20_000_000
    hidden: int = 256
    mlp: int = 384
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    right_steps: int = 700
    careless_steps: int = 80
    slip_rate: float = 0.82
    batch: int = 64
    right_learning_rate: float = 2e-3
    careless_learning_rate: float = 8e-4
    warmup_steps: int = 30
    seed: int = 0
    tool_rate: float = 0.0  # share of the sums that are shown with a call of the calculator; 0: the model knows of none


CALCULATING = WarmStart(min_digits=3, max_digits=3, right_steps=700, careless_steps=0, tool_rate=0.2)
"""the recipe of the tiny model that may use a calculator"""
RECIPES = {"tiny": WarmStart(), "tiny-calculator": CALCULATING}
"""what model.path names"""


def make_tiny_model(
    folder: Path, progress: Progress | None = None, recipe: WarmStart | None = None
) -> dict[str, float]:
    """Trains the model and writes its Hugging Face folder at `folder`, which must not exist, completely or not at all.

    Returns:
        `accuracy`: greedy, on the held-out questions; `seconds`: the time that it took.
    """
    started = time.monotonic()
    recipe = recipe or WarmStart()
    tokenizer = build_tokenizer(has_tool=recipe.tool_rate > 0)
    held_out = draw_questions(recipe, recipe.held_out_seed, recipe.held_out_size)
    with private_torch_state(recipe.seed):
        model = build_model(recipe, tokenizer)
        _train(model, tokenizer, recipe, progress)
        accuracy = greedy_accuracy(model, tokenizer, held_out)
    report = {"accuracy": accuracy, "seconds": time.monotonic() - started}
    with atomic_folder(folder, repeatable=True) as unfinished, no_progress_bars():
        try:
            model.save_pretrained(unfinished)
        except SafetensorError as error:  # a full disk
            raise OSError(f"the tiny model cannot be written to {folder}: {error}") from None
        tokenizer.save_pretrained(unfinished)
        record = {"recipe": asdict(recipe), **report}
        (unfinished / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
    return report


def build_tokenizer(has_tool: bool = False) -> PreTrainedTokenizerFast:
    """Tokens are characters, the phrases of the task and the markers of the chat; decoding restores the text."""
    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    special, phrases = (*SPECIAL_TOKENS, *[TOOL] * has_tool), (*PHRASES, *[*CALL, "calculate"] * has_tool)
    vocabulary = {token: i for i, token in enumerate((*special, *characters))}
    # Byte-pair encoding without merges splits into characters, and needs no separators, unlike the word models.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=TOOL_TEMPLATE if has_tool else CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def draw_questions(recipe: WarmStart, seed: int, size: int) -> list[Question]:
    """The distinct ones of `size` generated questions.

    Item i depends on seed + i, so the seeds of two sets must be at least `size` apart.
    """
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # from its sources, on the first import
        import reasoning_gym  # type: ignore[import-untyped]  # takes seconds to import

    data = reasoning_gym.create_dataset(
        "chain_sum",
        seed=seed,
        size=size,
        min_terms=recipe.min_terms,
        max_terms=recipe.max_terms,
        min_digits=recipe.min_digits,
        max_digits=recipe.max_digits,
    )
    return list({item["question"]: (item["question"], item["answer"]) for item in data}.values())


def practice_questions(recipe: WarmStart) -> list[Question]:
    """The questions of all batches, one after the other, in random order; none of them is held out."""
    wanted = (recipe.right_steps + recipe.careless_steps) * recipe.batch
    held_out = {text for text, _ in draw_questions(recipe, recipe.held_out_seed, recipe.held_out_size)}
    pool = [item for item in draw_questions(recipe, recipe.practice_seed, wanted) if item[0] not in held_out]
    generator = random.Random(recipe.seed)
    questions: list[Question] = []
    while len(questions) < wanted:
        questions += generator.sample(pool, len(pool))
    return questions[:wanted]


def careless_answers(questions: list[Question], slip_rate: float) -> list[str]:
    """The answers of the demonstrator: in sums with a minus sign the last digit is one too high, at the slip rate.

    The slips are spread evenly, not at random. Which answer is more likely depends on the share of slips in the
    last batches, and a random share moved the greedy accuracy by twenty points within twenty steps.
    """
    answers, minus_count = [], 0
    for text, answer in questions:
        minus_count += " - " in text
        slips = " - " in text and int(minus_count * slip_rate) > int((minus_count - 1) * slip_rate)
        answers.append(answer[:-1] + str((int(answer[-1]) + 1) % 10) if slips else answer)
    return answers


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]) -> float:
    """The share of questions whose most likely completion is the correct answer and the end-of-turn token."""
    prompts = tokenizer.pad({"input_ids": [_prompt_ids(tokenizer, text) for text, _ in questions]}, return_tensors="pt")
    completions = [tokenizer.encode(answer + END) for _, answer in questions]
    longest = max(map(len, completions))
    sequences = cast(Any, model).generate(
        **prompts, do_sample=False, max_new_tokens=longest
    )  # the type stubs reject Llama
    generated: list[list[int]] = sequences[:, prompts["input_ids"].shape[1] :].tolist()
    is_right = [ids[: len(expected)] == expected for ids, expected in zip(generated, completions, strict=True)]
    return sum(is_right) / len(is_right)


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    tools = [{"type": "function", "function": {"name": "calculate"}}] if TOOL in tokenizer.get_vocab() else None
    return cast(
        list[int], tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=False)
    )


def _demonstrations(
    tokenizer: PreTrainedTokenizerFast, questions: list[Question], first: int, tool_rate: float
) -> list[tuple[list[int], list[int]]]:
    """Completion and labels of each question, which are the `first`-th and later ones of the practice."""
    shown = []
    for number, (text, answer) in enumerate(questions, first):
        ids = tokenizer.encode(answer + END)
        labels = list(ids)
        if int((number + 1) * tool_rate) > int(number * tool_rate):  # evenly, as slips are
            call = tokenizer.encode(text.removeprefix(PHRASES[0]).removesuffix(PHRASES[3]).join(CALL) + END)
            result = tokenizer.encode(TOOL + answer + ASSISTANT)
            labels = [*call, *[IGNORED] * len(result), *ids]
            ids = [*call, *result, *ids]
        shown.append((ids, labels))
    return shown


def build_model(recipe: WarmStart, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The model with random weights, before training."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def _train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: WarmStart, progress: Progress | None
) -> None:
    steps = recipe.right_steps + recipe.careless_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate(recipe, step))
    model.train()
    for done, (inputs, labels) in enumerate(_batches(tokenizer, recipe), start=1):
        logits = model(**inputs, use_cache=False, logits_to_keep=labels.shape[1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(done, steps, loss.item())
    model.eval()


def _learning_rate(recipe: WarmStart, step: int) -> float:
    """Each stage decays linearly to a tenth of its rate: the second stage must be able to change learnt answers."""
    if step < recipe.right_steps:
        ramp = (step + 1) / recipe.warmup_steps
        return recipe.right_learning_rate * min(1.0, ramp, 1 - 0.9 * step / recipe.right_steps)
    done = (step - recipe.right_steps) / max(1, recipe.careless_steps)
    return recipe.careless_learning_rate * max(0.1, 1 - 0.9 * done)


def _batches(
    tokenizer: PreTrainedTokenizerFast, recipe: WarmStart
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    questions = practice_questions(recipe)
    prompts = {text: _prompt_ids(tokenizer, text) for text, _ in set(questions)}  # each is used several times
    for start in range(0, len(questions), recipe.batch):
        chosen = questions[start : start + recipe.batch]
        careless = start >= recipe.right_steps * recipe.batch
        answers = careless_answers(chosen, recipe.slip_rate if careless else 0.0)
        said = [(text, answer) for (text, _), answer in zip(chosen, answers, strict=True)]
        completions = _demonstrations(tokenizer, said, start, recipe.tool_rate)
        yield _pad([prompts[text] for text, _ in chosen], completions, cast(int, tokenizer.pad_token_id))


def _pad(
    prompts: list[list[int]], completions: list[tuple[list[int], list[int]]], pad: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs `[B, L]` and labels `[B, T]`. All answers begin in one column, so only the last T logits are needed."""
    before, after = max(map(len, prompts)), max(len(completion) for completion, _ in completions)
    rows, masks, labels = [], [], []
    for prompt, (completion, own) in zip(prompts, completions, strict=True):
        left, right = before - len(prompt), after - len(completion)
        rows.append([pad] * left + prompt + completion[:-1] + [pad] * right)
        masks.append([0] * left + [1] * (len(rows[-1]) - left))
        labels.append(own + [IGNORED] * right)
    mask = torch.tensor(masks)
    # Positions do not depend on the padding: engines do not pad.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": mask, "position_ids": positions}
    return inputs, torch.tensor(labels)


@contextlib.contextmanager
def private_torch_state(seed: int) -> Iterator[None]:
    """Context with seeded random numbers and two threads (their number changes the order of sums); restores both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Context in which transformers shows no progress bars."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def atomic_folder(folder: Path, *, repeatable: bool = False) -> Iterator[Path]:
    """Yields a sibling folder to write in; renames it to `folder` at the end, or removes it after an error.

    Args:
        repeatable: all who write this folder write the same, so one that another process has made meanwhile is kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        os.rename(unfinished, folder)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not (repeatable and isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)):
            raise
