"""What it costs to keep completions: time of the training thread, CPU of the writing thread, bytes and memory.

    python bench/completions.py [--model FOLDER] [--completions N] [--tokens T] [--step-s SECONDS]

Makes N completions of T random tokens each, four of a prompt, hands them over as a step does, and writes them to a
temporary folder. CPU time of threads is measured, so other work on the machine disturbs little. `--step-s` is the time
of a step to compare with: the writing thread shares the interpreter with training, so its CPU time is the most that a
step can lose. Prints a table and writes bench/results/completions.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Memory

from rlx.data.prompts import load_tokenizer
from rlx.models.tiny import build_tokenizer
from rlx.samples.columns import Kind, StepCompletions, TrainedTokens, as_table
from rlx.samples.token_texts import TokenTexts
from rlx.samples.writer import CompletionWriter, Keeping, as_bytes
from rlx.storage.filesystem import Storage
from rlx.types import Completion, Prompt, ScoredCompletion

_GROUP = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="folder with a tokenizer (default: that of the tiny model)")
    parser.add_argument("--completions", type=int, default=256, help="of a rank's step")
    parser.add_argument("--tokens", type=int, default=16, help="of each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a training step of this size")
    given = parser.parse_args(argv)
    tokenizer = load_tokenizer(given.model, False) if given.model else build_tokenizer()
    row = measured(tokenizer, given.completions, given.tokens, given.steps)
    row |= {"cpu share of a step": row["thread CPU s"] / given.step_s, "step s": given.step_s}
    print("\n".join(f"{name:34} {value:,.4g}" for name, value in row.items()))
    out = Path(__file__).parent / "results" / "completions.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(vars(given) | row, indent=1) + "\n")
    return 0


def measured(tokenizer: Any, completions: int, tokens: int, steps: int) -> dict[str, float]:
    """Medians over steps, the first one of which is left out: it decodes most tokens for the first time."""
    texts, memory = TokenTexts(tokenizer), Memory(torch.device("cpu"))
    made = [step_of(tokenizer, number, completions, tokens) for number in range(steps)]
    cpu, sizes, handed = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = CompletionWriter(Storage.local(Path(folder)), Keeping(1.0, 0, 0, 1), tokenizer, print)
        for step in made:
            memory.forget()
            started = time.thread_time()
            sizes.append(len(as_bytes(as_table(step, texts))))
            cpu.append(time.thread_time() - started)
            started = time.perf_counter()
            writer.keep(step)
            handed.append(time.perf_counter() - started)
            writer.wait()
        writer.close()
    size = statistics.median(sizes)
    return {
        "completions": completions,
        "tokens of each": tokens,
        "training thread ms": 1000 * statistics.median(handed[1:]),
        "thread CPU s": statistics.median(cpu[1:]),
        "bytes of a completion": size / completions,
        "bytes of a token": size / completions / tokens,
        "MiB of a step": size / 2**20,
        "peak memory MiB": memory.peak() / 2**20,
    }


def step_of(tokenizer: Any, number: int, completions: int, tokens: int) -> StepCompletions:
    """Completions as training hands them over: log-probabilities of both sides, and an advantage for each response."""
    draws, seeds = random.Random(number), np.random.default_rng(number)
    vocabulary = len(tokenizer)
    rows = []
    for i in range(completions):
        ids = tuple(int(vocabulary * draws.random() ** 3) for _ in range(tokens))  # frequent ones, as in language
        prompt = Prompt(number * completions + i // _GROUP, ids[:64], "a question of some words", "42")
        logprobs = tuple((-seeds.exponential(0.5, tokens)).tolist())
        completion = Completion(prompt, i % _GROUP, ids, logprobs, i % 8 > 0, number)
        text = str(tokenizer.decode(ids))
        rows.append(ScoredCompletion(completion, i % 2, i % 2 == 1, {"task": i % 2}, text=text, answer="41"))
    said = np.array([row.completion.logprobs for row in rows], np.float32)
    old = said + seeds.normal(0, 1e-3, said.shape).astype(np.float32)
    newest = old + seeds.normal(0, 1e-2, said.shape).astype(np.float32)
    advantages = np.repeat(seeds.normal(size=(completions, 1)), tokens, axis=1).astype(np.float32)
    return StepCompletions(
        Kind.TRAINING, number + 1, 1000, rows, TrainedTokens(old, newest, advantages, np.ones(completions))
    )


if __name__ == "__main__":
    raise SystemExit(main())
