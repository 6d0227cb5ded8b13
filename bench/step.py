"""Where a step's time goes, and how far rollout and update are from bare vLLM and a bare training loop.

    python bench/step.py [--SECTION.SETTING VALUE ...]

Everything is measured in one run on one machine, with the prompts, lengths, threads and models of the run itself; only
the ratios mean something elsewhere. Prints a table and writes bench/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from rlx import crew, data, inputs, launch
from rlx.command_line import add_settings, parse
from rlx.config import RunConfig, from_tree, with_overrides
from rlx.rollout.engine import CPU_ENVIRONMENT, ENVIRONMENT
from rlx.rollout.pool import request_seed
from rlx.storage import open_storage

_WARM = 2  # first steps and rounds that are not counted
_ROUNDS = 8
_PARTS = ("rollout", "reward", "annotate", "update", "sync")
_DEFAULTS = {"name": "bench", "train.steps": _WARM + _ROUNDS, "eval.every": 0, "checkpoint.every": 0}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_settings(parser)
    _, given = parse(parser, sys.argv[1:] if argv is None else argv)
    config = from_tree(with_overrides({}, _DEFAULTS | given))
    with tempfile.TemporaryDirectory() as folder:
        path = inputs.model_folder(config)
        config = config.model_copy(update={"storage": folder, "model": config.model.model_copy(update={"path": path})})
        launch.connect(config)
        results = measure(config, path)
    ray.shutdown()
    show(results)
    out = Path(__file__).parent / "results" / "step.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure(config: RunConfig, path: str) -> dict[str, Any]:
    """Medians over the counted steps of a real run, then the same work done bare."""
    steps: list[dict[str, Any]] = []
    tables = inputs.prompt_tables(config, path)
    run_folder = open_storage(config.storage) / "bench"
    launch.run(config, run_folder, tables=tables, on_report=lambda metrics, _: steps.append(metrics))
    counted = [s for s in steps if s["step"] > _WARM]
    median = {key: statistics.median(s[key] for s in counted) for key in counted[0]}
    table = pa.concat_tables(tables["train"].iter_batches(batch_size=None, batch_format="pyarrow"))
    prompts = data.PromptStream(table, config.seed).next(config.train.prompts_per_step)
    bare = ray.remote(num_cpus=1, runtime_env={"env_vars": ENVIRONMENT | CPU_ENVIRONMENT})
    drawn, rollout = ray.get(bare(bare_rollout).remote(config, path, [list(p.token_ids) for p in prompts]))
    update = ray.get(bare(bare_update).remote(config, path, drawn))
    return {
        "seconds": {part: median[f"time/{part}"] for part in _PARTS} | {"step": median["time/step"]},
        "rollout tokens/s": median["tokens/rollout_per_s"],
        "bare vLLM tokens/s": rollout,
        "rollout / bare vLLM": median["tokens/rollout_per_s"] / rollout,
        "update tokens/s": median["tokens/update_per_s"],
        "bare loop tokens/s": update,
        "update / bare loop": median["tokens/update_per_s"] / update,
    }


def bare_rollout(config: RunConfig, path: str, prompts: list[list[int]]) -> tuple[list[tuple[int, list[int]]], float]:
    """vLLM's own LLM.generate on the same prompts: (prompt length, tokens) of each completion, and tokens/s."""
    import warnings

    warnings.filterwarnings("ignore")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from rlx.data import load_tokenizer

    llm = LLM(model=path, skip_tokenizer_init=True, disable_log_stats=True, **crew.engine_options(config))
    end = load_tokenizer(path).eos_token_id

    def sampling(prompt: int, sample: int, round_: int) -> Any:
        return SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            stop_token_ids=[end],
            seed=request_seed(config.seed, round_, prompt, sample),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    rates, drawn = [], []
    pairs = [(p, s) for p in range(len(prompts)) for s in range(config.train.samples_per_prompt)]
    requests = [{"prompt_token_ids": prompts[p]} for p, _ in pairs]
    for round_ in range(_WARM + _ROUNDS):
        params = [sampling(p, s, round_) for p, s in pairs]
        started = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        drawn = [prompts[p] + list(o.outputs[0].token_ids) for (p, _), o in zip(pairs, outputs, strict=True)]
        rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    lengths = [len(prompts[p]) for p, _ in pairs]
    return list(zip(lengths, drawn, strict=True)), statistics.median(rates[_WARM:])


def bare_update(config: RunConfig, path: str, sequences: list[tuple[int, list[int]]]) -> float:
    """Forward, backward and AdamW of plain transformers models on the same sequences: tokens/s over both models."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    critic: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-6, fused=True) for m in (policy, critic)]
    size = len(sequences) // config.train.minibatches
    batches = [sequences[i * size : (i + 1) * size] for i in range(config.train.minibatches)]
    rates = []
    for _ in range(_WARM + _ROUNDS):
        started = time.perf_counter()
        for batch in batches * config.train.epochs:
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for _, s in batch], batch_first=True)
            first = min(length for length, _ in batch) - 1
            logits = policy(input_ids=ids, logits_to_keep=ids.shape[1] - first, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, first + 1 :].flatten())
            (loss + critic(input_ids=ids, use_cache=False).last_hidden_state.square().mean()).backward()
            for model, optimizer in zip((policy, critic), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        tokens = sum(len(s) for _, s in sequences) * config.train.epochs
        rates.append(tokens / (time.perf_counter() - started))
    return statistics.median(rates[_WARM:])


def show(results: dict[str, Any]) -> None:
    """The table for people."""
    whole = results["seconds"]["step"]
    for part, seconds in results["seconds"].items():
        print(f"{part:>10}  {seconds:7.3f} s  {seconds / whole:6.1%}")
    for key, value in results.items():
        if key != "seconds":
            print(f"{key:>20}  {value:10,.2f}")


if __name__ == "__main__":
    sys.exit(main())
