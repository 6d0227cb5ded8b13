"""How soon a run goes on after a part of it was killed: seconds for an engine, a train worker, and the driver.

    python bench/recovery.py [--gpu] [--SECTION.SETTING VALUE ...]

One run with two workers and two engines, which write a checkpoint every fifth step. An engine is killed first
(`kill -9`), then a worker, then the driver, whose run is resumed. Counted is the time from the kill until a step is
shown that was not there before, and for the engine until it is in use again, too. Steps between the checkpoint and the
kill are part of it. Counted besides: how long processes stay after the driver's death, and at the end GPUs' memory.
Left out: whether metrics differ, see tests/chaos.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import table
import workload
from script_run import ScriptRun

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig

SCRIPT = "ppo.py"
ENGINE, WORKER = "ray::VLLMEngine", "ray::RayTrainWorker"
NAME = "recovery"
LIMIT_S = 300.0
"""until a killed part counts as never replaced"""
STEPS = 400  # more than the kills take; the run is ended before
_TWO = {"scaling.num_workers": 2, "rollout.num_engines": 2, "checkpoint.every": 5, "train.prompts_per_step": 16}
_BACK = re.compile(r"engine \d+ is back")


class Run(ScriptRun):
    """`experiments/ppo.py`, and the waits for what it does."""

    def wait(self, ready: Callable[[], bool], what: str) -> float:
        """The seconds until then.

        Raises:
            SystemExit: it takes too long, or the run has ended.
        """
        begun = time.monotonic()
        while not ready():
            if time.monotonic() - begun > LIMIT_S or self.process.poll() is not None:
                raise SystemExit(f"no {what}: {self.output.read_text()[-2000:]}")
            time.sleep(0.02)
        return time.monotonic() - begun

    def wait_for_new_step(self, more: int = 1) -> float:
        """The seconds until it has shown so many steps more."""
        last = self.step()
        return self.wait(lambda: self.step() >= last + more, f"step after {last}")

    def wait_for_end(self) -> float:
        """The seconds until none of its processes is left; those that stay are killed."""
        begun = time.monotonic()
        while self.processes() and time.monotonic() - begun < LIMIT_S:
            time.sleep(0.1)
        for process in self.processes():
            process.kill()
        return time.monotonic() - begun


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(STEPS, STEPS))

    def script() -> int:
        args, config = workload.read(options, argv, workload.CPU | _TWO, workload.GPU | _TWO)
        if config.scaling.num_workers < 2 or config.rollout.num_engines < 2:
            raise ConfigError("scaling.num_workers and rollout.num_engines: two at least, of which one is killed")
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="rlx-recovery-") as folder:
            here = {"storage": folder, "name": NAME, "model.path": workload.model_folder(config)}
            ready = from_tree(with_overrides(config.model_dump(), here), "command line")
            figures = measure(ready, Path(folder))
            table.finish("recovery", figures, ready, args.out, load, described(config))
        return 0

    return exit_code(script)


def described(config: RunConfig) -> dict[str, str]:
    """What was killed."""
    workers, engines = config.scaling.num_workers, config.rollout.num_engines
    return {"run": f"{workers} workers, {engines} engines, a checkpoint every {config.checkpoint.every} steps"}


def measure(config: RunConfig, folder: Path) -> dict[str, float]:
    """The table; the run is ended when all of it is there."""
    settings = folder / "settings.yaml"
    settings.write_text(config.model_dump_json())  # which is YAML, too
    runs = [run := Run(folder / "first.txt", SCRIPT, "--config", str(settings))]
    try:
        figures = {"start to step 0, s": run.wait(lambda: run.step() >= 0, "step 0")}
        run.wait_for_new_step(2)  # the first ones are slower
        figures["step, s"] = run.wait_for_new_step(4) / 4
        for kill in (engine_killed, worker_killed, driver_killed):
            workload.say(str(figures))
            figures |= kill(run)
        workload.say(str(figures))
        runs.append(again := Run(folder / "again.txt", SCRIPT, "--resume", NAME, "--storage", config.storage))
        last = run.step()
        figures["driver's run resumed to a new step, s"] = again.wait(lambda: again.step() > last, f"step after {last}")
    finally:
        runs[-1].process.terminate()
        ending = runs[-1].wait_for_end()
    return figures | {"SIGTERM: all processes gone after, s": ending} | gpu_memory()


def engine_killed(run: Run) -> dict[str, float]:
    """The seconds until the run goes on without the engine, and until it is in use again."""
    run.processes(ENGINE)[0].kill()
    begun = time.monotonic()
    figures = {"engine killed: next step after, s": run.wait_for_new_step()}
    run.wait(lambda: bool(_BACK.search(run.output.read_text())), "engine that is back")
    return figures | {"engine killed: in use again after, s": time.monotonic() - begun}


def worker_killed(run: Run) -> dict[str, float]:
    """The seconds until all workers have started again and are past the step at which one died."""
    run.wait_for_new_step(2)
    run.processes(WORKER)[0].kill()
    return {"worker killed: next new step after, s": run.wait_for_new_step()}


def driver_killed(run: Run) -> dict[str, float]:
    """The seconds until nothing is left of a run without a driver."""
    run.wait_for_new_step(2)
    run.kill()
    return {"driver killed: all processes gone after, s": run.wait_for_end()}


def gpu_memory() -> dict[str, float]:
    """What is held on the GPUs of this command, by whomever; nothing without any."""
    if not workload.gpus():
        return {}
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        words += ["--id", given]
    used = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return {"most memory in use on a GPU afterwards, MiB": max(map(float, used))}


if __name__ == "__main__":
    sys.exit(main())
