"""TRL's trainers in this process: on policy with vLLM inside it, and asynchronous beside vLLM's server.

What bench/against_trl.py runs, in a process of its own. TRL is not imported before one of them begins. The
asynchronous trainer asks the hub for FlashAttention 3, of which PyPI has no wheel; torch's own kernel takes its place
here. Left out: how TRL is set, which the caller decides.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import IO, Any

import alike

Measured = list[tuple[int, float]]
"""response tokens and seconds of each step"""

_PATIENCE_S = 300.0
# A reply is all its text: TRL takes replies apart, and knows how for the chat templates of known models only.
_REPLY = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"content": "text"}},
}


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Of each completion: how many tokens it has. TRL's asynchronous trainer imports it in a process of its own."""
    return [float(len(ids)) for ids in completion_ids]


def on_policy(path: str, given: Mapping[str, Any], prompts: alike.Prompts) -> Measured:
    """Runs GRPOTrainer on each step's prompts."""
    warnings.filterwarnings("ignore")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokens: list[int] = []

    def counted(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return reward(completion_ids)

    ends, watch = clock(given["max_steps"] // len(prompts))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(output_dir=folder, **given)
        tokenizer = AutoTokenizer.from_pretrained(path)
        rows = Dataset.from_dict({"prompt": alike.texts(tokenizer, prompts)})
        trainer = GRPOTrainer(path, counted, config, rows, processing_class=tokenizer, callbacks=[watch])
        trainer.train()
    return [(count, after - before) for count, (before, after) in zip(tokens, pairwise(ends), strict=False)]


def ahead(
    path: str, given: Mapping[str, Any], prompts: alike.Prompts, **doors: Any
) -> tuple[Measured, dict[str, float]]:
    """Runs AsyncGRPOTrainer beside a `server`, on the first of this process's GPUs.

    Args:
        doors: what TRL's trainer takes beside its config, such as `weight_transfer`.

    Returns:
        Tokens and seconds of each step, whose tokens are those trained on; and the means of TRL's own metrics over the
        optimizer steps, without the first half of them.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = first  # with two, TRL would train on both
    warnings.filterwarnings("ignore")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    attention_of_torch()
    ends, watch = clock(given["weight_sync_steps"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = _REPLY
    told = [[{"role": "user", "content": text}] for text in alike.texts(tokenizer, prompts)]
    with tempfile.TemporaryDirectory() as folder:
        config = AsyncGRPOConfig(output_dir=folder, **given)
        trainer = AsyncGRPOTrainer(
            path, reward, config, Dataset.from_dict({"prompt": told}), tokenizer, callbacks=[watch], **doors
        )
        trainer.train()
    logs = [each for each in trainer.state.log_history if "batch/trained_tokens_per_step" in each]
    per_step, updates = [each["batch/trained_tokens_per_step"] for each in logs], given["weight_sync_steps"]
    tokens = [round(sum(per_step[at : at + updates])) for at in range(0, len(per_step), updates)]
    seconds = [after - before for before, after in pairwise(ends)]
    return list(zip(tokens, seconds, strict=False)), means(logs[len(logs) // 2 :])


def means(logs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each number that all entries have."""
    names = [name for name in logs[0] if all(isinstance(each.get(name), int | float) for each in logs)]
    return {name: sum(each[name] for each in logs) / len(logs) for name in names}


def clock(updates: int) -> tuple[list[float], Any]:
    """When training began and when each step ended, a step being so many optimizer steps; and what TRL calls then."""
    from transformers import TrainerCallback

    ends = [0.0]

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                ends.append(time.perf_counter())

    return ends, Watch()


@contextmanager
def server(path: str, served: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> Iterator[str]:
    """vLLM's server on the last GPU, from when it is ready; gives its address. It ends with the context.

    Args:
        served: its arguments.
        environment: what it has beside this process's.
        log: what it prints goes there.

    Raises:
        RuntimeError: it ended before it was ready, or took more than five minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path]
    words += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *served]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": _last_gpu()} | dict(environment)
    process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, log.name)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine too
        process.wait()


def _last_gpu() -> str:
    import torch

    return (os.environ.get("CUDA_VISIBLE_DEVICES") or str(torch.cuda.device_count() - 1)).split(",")[-1]


def _wait(address: str, process: subprocess.Popen[bytes], log: str) -> None:
    """Until a server answers."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start; what it printed is in {log}")


def attention_of_torch() -> None:
    """Has TRL's asynchronous trainer take torch's kernel for packed rows where it asks the hub for FlashAttention 3."""
    from trl.experimental.async_grpo import packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_packed_rows)


def _packed_rows(
    query: Any,
    key: Any,
    value: Any,
    *ends: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Any:
    """FlashAttention's function of this name by torch: `[P, heads, size]`, the last queries of a row being those of its
    last keys; `ends` are where rows of queries and of keys begin and end, and the longest of both."""
    from torch.nn.attention.varlen import varlen_attn

    from rlx.models.packing import FEWER_KEYS

    window = (window_size[0], 0) if causal else window_size
    return varlen_attn(query, key, value, *ends, scale=softmax_scale, window_size=window, **FEWER_KEYS)
