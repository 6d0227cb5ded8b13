"""How long training stands still for a checkpoint, and how many bytes one takes, beside a bare torch.save.

    python bench/checkpoint.py [--gpu] [--storage ADDRESS | s3-local] [--checkpoints N] [--hidden N] [--layers N]

A random Llama of about 30 million float32 parameters with AdamW, one process, no Ray. On a GPU the state is copied into
pinned memory, as in a run, and for comparison into other memory. Everything is measured in one
run on one machine; only the ratios mean something elsewhere. `s3-local` starts a moto server. Prints a table and
writes bench/results/checkpoint.json, one entry per kind of storage.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from rlx.models import fsdp
from rlx.models.policy import Policy
from rlx.storage import checkpoint_catalog, checkpoint_files
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import Retention
from rlx.storage.checkpoint_files import Copies, ModelAndOptimizer, Shard, new_copies
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.checkpoint_writer import CheckpointWriter, FinishedCheckpoint
from rlx.storage.filesystem import Storage, free_name
from rlx.training.checkpointing import PinnedMemory

_WARM = 1  # first checkpoints that are not counted
_START_S = 60.0
_BUCKET = "rlx-bench"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--storage", help="an address, or s3-local (default: a temporary folder)")
    parser.add_argument("--gpu", action="store_true", help="the model is on a GPU")
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, _storage(given.storage, folder) as address:
        device = "cuda" if given.gpu else "cpu"
        dist.init_process_group(
            "nccl" if given.gpu else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        place = open_storage(address)
        run = place / free_name(place, "bench-checkpoint")
        try:
            results = measure(policy(given.hidden, given.layers, device), run, Path(folder), given.checkpoints)
        finally:
            run.delete()
            dist.destroy_process_group()
    show(results)
    out = Path(__file__).parent / "results" / "checkpoint.json"
    out.parent.mkdir(exist_ok=True)
    kinds = json.loads(out.read_text()) if out.exists() else {}
    kind = "folder" if place.is_local else given.storage.partition("://")[0]
    kinds[f"{kind}, GPU" if given.gpu else kind] = results
    out.write_text(json.dumps(kinds, indent=1) + "\n")
    return 0


def policy(hidden: int, layers: int, device: str) -> ModelAndOptimizer:
    """A random model that has taken one optimizer step, sharded over the one rank."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    sharded = fsdp.shard(Policy(LlamaForCausalLM(config)).to(device), init_device_mesh(device, (1,)), torch.float32)
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    for parameter in sharded.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return ModelAndOptimizer(sharded, optimizer)


def measure(trained: ModelAndOptimizer, run: Storage, disk: Path, count: int) -> dict[str, Any]:
    """Medians over the counted checkpoints, then the same state by torch.save to this machine's disk."""
    saver = CheckpointWriter(run, Retention())
    pinned = PinnedMemory(print) if next(trained.model.parameters()).is_cuda else None
    stalls, unpinned, writes, bare = [], [], [], []
    for step in range(1, _WARM + count + 1):
        if pinned:
            unpinned.append(_copy(trained, new_copies)[1])
        shards, seconds = _copy(trained, pinned.copies if pinned else new_copies)
        started = time.perf_counter()
        saver.save(shards, _manifest(step))
        stalls.append(seconds + time.perf_counter() - started)
        writes.append(_awaited(saver).seconds)
        bare.append(_torch_save(trained, disk / "bare.pt"))
    place = checkpoint_catalog.complete_checkpoints(run)[-1].folder
    written = sum((place / name).size() or 0 for name in place.names())
    stall, write, plain = (statistics.median(seconds[_WARM:]) for seconds in (stalls, writes, bare))
    more = {"the first time": stalls[0], "copy, not pinned": statistics.median(unpinned[_WARM:])} if pinned else {}
    return {
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "seconds": {"training stands still": stall, **more, "whole write": write, "torch.save": plain},
        "stall / write": stall / write,
        "stall / torch.save": stall / plain,
        "write / torch.save": write / plain,
        "bytes / state": written / _state_bytes(trained),
    }


def _copy(trained: ModelAndOptimizer, copies: Copies) -> tuple[dict[str, Shard], float]:
    """Copies of the state in main memory, and the seconds that they take."""
    started = time.perf_counter()
    shards = checkpoint_files.copy_shards({"policy": trained}, {}, copies)
    return shards, time.perf_counter() - started


def _manifest(step: int) -> Manifest:
    return Manifest(
        rlx="bench",
        step=step,
        ranks=1,
        metrics={},
        tokens=0,
        kl={},
        scores={},
        cursor={},
        evaluation={},
        mlflow_run_id=None,
        config={},
        files={},
    )


def _awaited(saver: CheckpointWriter) -> FinishedCheckpoint:
    while not (news := saver.finished_checkpoint()):
        time.sleep(0.001)
    return news


def _torch_save(trained: ModelAndOptimizer, file: Path) -> float:
    """Seconds until the same state is on the disk."""
    started = time.perf_counter()
    with file.open("wb") as stream:
        torch.save({"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return time.perf_counter() - started


def _state_bytes(trained: ModelAndOptimizer) -> int:
    """Of the parameters and the optimizer's state."""
    moments = [tensor for state in trained.optimizer.state.values() for tensor in state.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*trained.model.parameters(), *moments))


@contextmanager
def _storage(chosen: str | None, folder: str) -> Iterator[str]:
    """The address to write to, with a server if one is asked for."""
    if chosen != "s3-local":
        yield chosen or folder
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(server, process)
        requests.put(f"{server}/{_BUCKET}", timeout=_START_S).raise_for_status()
        os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
        yield f"s3://{_BUCKET}?region=us-east-1&endpoint_override={server}"
    finally:
        process.kill()
        process.wait()


def _await(server: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            requests.get(server, timeout=_START_S)
            return
        except requests.ConnectionError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def show(results: dict[str, Any]) -> None:
    """The table for people."""
    print(f"{results['parameters'] / 1e6:.1f} M parameters")
    for part, seconds in results["seconds"].items():
        print(f"{part:>22}  {seconds:8.3f} s")
    for key, value in results.items():
        if key not in ("seconds", "parameters"):
            print(f"{key:>22}  {value:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
