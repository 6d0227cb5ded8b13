"""How long prompts take to be read and tokenized on one core and on two, and who holds how much of them.

    python bench/data.py [--prompts N] [--model FOLDER] [--source jsonl|saved]

Writes N prompts (a million) as JSON lines, or as a folder of Hugging Face's `Dataset.save_to_disk`, and makes a prompt
table of them in clusters of one and two cores, in turns. All processes of a cluster are kept on its cores: else the
loading of the tokenizer and Ray's own work would be done on the second core while "one" is measured.
Then one of two ranks takes steps from the table; `start_s` is the time from the beginning of the process, imports and
Ray included, to the prompts of the first step. Peak memory is resident memory (VmHWM), shared pages included; beside it
stands what the object store holds. Prints a table and writes bench/results/data.json. The ratio says something only
while the machine does nothing else: beside each measurement stands how many CPUs other processes kept busy meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow as pa

_STEP = 256  # prompts of a rank's step
_STEPS = 64


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--source", choices=("jsonl", "saved"), default="jsonl")
    parser.add_argument("--model", help="folder with a tokenizer (default: the one of the tiny model)")
    parser.add_argument("--rounds", type=int, default=2, help="measurements with each number of cores")
    parser.add_argument("--one", nargs=3, metavar=("CPUS", "FILE", "MODEL"), help="do one measurement and print it")
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(measured(int(given.one[0]), *given.one[1:])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file, model = Path(folder, "prompts"), given.model or _tokenizer(folder)
        file = write_prompts(file, given.prompts, given.source)
        rows = [_in_own_process(cpus, file, model) for _ in range(given.rounds) for cpus in (1, 2)]
        machine = bare_ratio(model)
    described = {"prompts": given.prompts, "source": given.source, "model": given.model or "tiny"}
    results = {**described, "runs": rows, **ratios(rows)}
    results["without Ray, 1 / 2"] = machine
    show(results)
    out = Path(__file__).parent / "results" / ("data.json" if given.source == "jsonl" else "data_saved.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def write_prompts(path: Path, count: int, source: str) -> Path:
    """Writes prompts as a file, or as a folder of Hugging Face's; returns its path."""
    if source == "saved":
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset(pa.Table.from_pylist(list(questions(count)))).save_to_disk(path)
        return path
    file = path.with_suffix(".jsonl")
    with file.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in questions(count))
    return file


def questions(count: int) -> Iterator[dict[str, str]]:
    """Questions of the length of school mathematics, with an answer each."""
    draw = random.Random(0)
    for number in range(count):
        a, b, c = (draw.randrange(2, 1000) for _ in range(3))
        question = f"Box {number} has {a} rows of {b} apples. {c} of them are sold. How many apples are left?"
        yield {"question": question, "answer": str(a * b - c)}


def bare_ratio(model: str) -> float:
    """How much sooner two plain processes tokenize the same prompts than one: what the machine can give at most."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(_bare, [(model, 2_000)] * 2, chunksize=1)  # imports
        times = []
        for _ in range(3):
            begin = time.monotonic()
            pool.apply(_bare, (model, 40_000))
            one = time.monotonic()
            pool.starmap(_bare, [(model, 20_000)] * 2, chunksize=1)
            times.append((one - begin) / (time.monotonic() - one))
    return statistics.median(times)


def _bare(model: str, count: int) -> None:
    from rlx.data import prompts

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = prompts.load_tokenizer(model)
    question = "Box {0} has {0} rows of {0} apples. {0} of them are sold. How many apples are left?"
    questions = [question.format(number) for number in range(1000)]
    for _ in range(count // 1000):
        prompts.encode_prompts(tokenizer, questions, None)


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds on one core / seconds on two, medians over the measurements."""

    def seconds(cpus: int, name: str) -> float:
        return statistics.median(row[name] for row in rows if row["cores"] == cpus)

    return {f"{name}, 1 / 2": seconds(1, name) / seconds(2, name) for name in ("tokenize_s", "total_s", "start_s")}


def show(results: dict[str, Any]) -> None:
    for row in results["runs"]:
        print(", ".join(f"{name} {value:,.4g}" for name, value in row.items()))
    print(", ".join(f"{name}: {value:.2f}" for name, value in results.items() if "/" in name))


# ---------------------------------------------------------------------------------------------------------------------
# One measurement, in a process of its own


def measured(cpus: int, file: str, model: str) -> dict[str, float]:
    """Seconds and peak memory of a prompt table made on so many cores, and of a rank that takes steps from it."""
    import ray

    from rlx.config.sections.data import DataConfig
    from rlx.data import prompts, sources

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])  # Ray's processes inherit it
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    data = DataConfig(source=file, params={}, max_prompt_tokens=256)
    begin = time.monotonic()
    tokenizer = prompts.TokenizerSource.of(model)
    rows = sources.read_rows(file, data, "data.source")
    read, busy = time.monotonic(), _others_seconds()
    table = prompts.tokenize_rows(rows, data, tokenizer)
    end, busy = time.monotonic(), _others_seconds() - busy
    store = _store_bytes()
    del rows
    rank = ray.remote(num_cpus=0)(_Rank).remote()
    steps = ray.get(rank.steps.remote(table))
    return {
        "cores": cpus,
        "read_s": read - begin,
        "tokenize_s": end - read,
        "total_s": end - begin,
        "blocks": table.num_blocks(),
        "store_MiB": store,
        "driver_MiB": _peak_mib(),
        "start_s": steps.pop("first_at") - psutil.Process().create_time(),
        **steps,
        "others_CPUs": busy / (end - read),
    }


class _Rank:
    """One rank of two, in a process of its own."""

    def steps(self, table: Any) -> dict[str, float]:
        """Takes the prompts of some steps."""
        from rlx.data.blocks import RankShares

        before = _peak_mib()
        shares = RankShares().configure({"train": table}, 2, None, None)
        stream = shares[0]["train"].stream(seed=0)
        times, first_at = [], 0.0
        for _ in range(_STEPS):
            start = time.monotonic()
            stream.next(2 * _STEP)
            times.append(time.monotonic() - start)
            first_at = first_at or time.time()
        return {
            "first_at": first_at,
            "first_step_s": times[0],
            "step_ms": 1000 * statistics.median(times[1:]),
            "slowest_step_ms": 1000 * max(times[1:]),
            "rank_MiB": _peak_mib(),
            "rank_MiB_before": before,
        }


def _others_seconds() -> float:
    """CPU seconds so far of all processes but this one and its descendants."""
    own = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            own += sum(process.cpu_times()[:2])
    everyone = psutil.cpu_times()
    return sum(everyone) - everyone.idle - everyone.iowait - own


def _in_own_process(cpus: int, file: Path, model: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", str(cpus), str(file), model]
    out = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def _peak_mib() -> float:
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) / 1024


def _store_bytes() -> float:
    """MiB of objects in the store now."""
    import ray

    total, free = (
        source().get("object_store_memory", 0.0) for source in (ray.cluster_resources, ray.available_resources)
    )
    return (total - free) / 2**20


def _tokenizer(folder: str) -> str:
    from rlx.models import tiny

    path = Path(folder, "model")
    tiny.build_tokenizer().save_pretrained(path)
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
