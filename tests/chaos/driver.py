"""A process that does one `rlx train` or `rlx sweep` after another, each at the moment that it is told.

What it prints and returns is a command's own. Its cluster, engine and worker stay from run to run, as a sweep's do, so
that starting them is paid for once. Orders come on stdin, a JSON object a line; an exit code goes back for each.
"""

import importlib
import json
import os
import sys
import time
from functools import partial

from rlx.runs import launch
from rlx.runs.processes import RunProcesses

KEPT = RunProcesses("workers")


def obey(command: str, words: list[str], output: str, at: float) -> int:
    """Does a command.

    Args:
        output: file for all that it prints.
        at: when it begins, by `time.monotonic`, which all processes of a machine share.
    """
    module = importlib.import_module(f"rlx.cli.{command}")
    if command == "sweep":
        KEPT.close()  # its trials need the room
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    time.sleep(max(0.0, at - time.monotonic()))
    return int(module.main(words))


if __name__ == "__main__":
    importlib.import_module("rlx.sweeps.tuner")  # what is slow to import is there before the first order
    launch.run = partial(launch.run, processes=KEPT)
    with os.fdopen(os.dup(1), "w") as answers:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            print(obey(**json.loads(line)), file=answers, flush=True)
