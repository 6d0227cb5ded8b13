"""What a newcomer sees after a mistake, and how soon: python bench/mistakes.py [--only WORD]

Runs each command of a table in a fresh folder and prints a Markdown table: the mistake, the seconds until the command
ended (and those of one CPU that it computed, which a busy machine distorts less), its exit code, and the last line that
it wrote to stderr. A row is marked where there was a traceback, where the exit code is 0, where more than one line
says what is wrong, and where it took more than 2 s though neither a model, nor a cluster, nor the search space's own
imports have to be waited for; on a machine with n processes for each core, more than 2 n s. Exits with 1 if a row is
marked.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LONGEST_S, _QUICK_S = 120.0, 2.0
_SHOWN = 300  # characters of a line


@dataclass(frozen=True)
class Mistake:
    """A command that somebody may type."""

    what: str
    words: str  # as in a shell, without the `rlx` before them
    waits: str = ""  # what takes longer than 2 s, if something does


MISTAKES = [
    Mistake("a command that there is not", "trian"),
    Mistake("a setting without its section", "train --lr 1e-4"),
    Mistake("a setting of another library", "train --batch-size 8"),
    Mistake("a typing error in a setting", "train --train.step 10"),
    Mistake("a typing error in a section", "train --trian.steps 10"),
    Mistake("a word too many", "train 10"),
    Mistake("an option without its value", "train --train.steps"),
    Mistake("text for a number", "train --train.steps many"),
    Mistake("a fraction for a whole number", "train --train.steps 2.5"),
    Mistake("a negative number", "train --train.actor-lr -1"),
    Mistake("a choice that there is not", "train --algorithm.advantage grop"),
    Mistake("GRPO with one completion", "train --algorithm.advantage grpo --train.samples-per-prompt 1"),
    Mistake("prompts that do not divide", "train --train.prompts-per-step 7"),
    Mistake("tensor parallelism that does not divide", "train --parallel.tp 2 --scaling.num-workers 3"),
    Mistake("a name with a slash", "train --name my/run"),
    Mistake("no such YAML file", "train --config nosuch.yaml"),
    Mistake("a YAML file with a typing error", "train --config typo.yaml"),
    Mistake("a YAML file that is malformed", "train --config bad.yaml"),
    Mistake("a YAML file with a list", "train --config list.yaml"),
    Mistake("1e3 as a whole number in YAML", "train --config exponent.yaml"),
    Mistake("no such prompt file", "train --data.source nosuch.csv --data.params {}"),
    Mistake("a column's name as the source", "train --data.source question --data.params {}"),
    Mistake("a CSV file with other columns", "train --data.source fragen.csv --data.params {}"),
    Mistake("a JSON file without answers", "train --data.source unanswered.jsonl --data.params {}"),
    Mistake("a prompt file of another kind", "train --data.source notes.txt --data.params {}"),
    Mistake("an empty folder of prompts", "train --data.source empty --data.params {}"),
    Mistake("a generator that there is not", "train --data.source reasoning_gym:leg_count"),
    Mistake("a parameter that a generator has not", "train --data.params.max_digit 3"),
    Mistake("a malformed name on the hub", "train --data.source hf:a/b/c/d/e --data.params {}"),
    Mistake("no such model folder", "train --model.path ./nosuch"),
    Mistake("a folder that is no model", "train --model.path empty"),
    Mistake("a model without a tokenizer", "train --model.path untokenized"),
    Mistake("a model without weights", "train --model.path weightless"),
    Mistake("a model that is too large for the disk", "train --model.path huge"),
    Mistake("a model name, and no network", "train --model.path no-such-org/model", "the hub"),
    Mistake("a prompt longer than the model", "train --model.path huge --data.max-prompt-tokens 4096"),
    Mistake("a GPU where there is none", "train --scaling.use-gpu true"),
    Mistake("more GPUs than there are", "train --rollout.tensor-parallel 64 --rollout.resources-per-engine {GPU: 64}"),
    Mistake("more workers than CPUs", "train --scaling.num-workers 4096 --train.prompts-per-step 8192"),
    Mistake("a label that no node has", "train --scaling.label-selector {disk: fast}"),
    Mistake("a label selector that is no mapping", "train --scaling.label-selector fast"),
    Mistake("a reward that there is not", "train --reward.functions {tusk: 1}"),
    Mistake("no such module with a reward", "train --reward.functions {my_reward:boom: 1}"),
    Mistake("no such function in it", "train --reward.functions {my_rewards:bom: 1}"),
    Mistake("a reward with other arguments", "train --reward.functions {my_rewards:other: 1}"),
    Mistake(
        "a reward that raises",
        "train --data.source fragen.csv --data.params {} --data.prompt-column frage --data.answer-column antwort "
        "--reward.functions {my_rewards:boom: 1}",
        "the child process of the reward",
    ),
    Mistake(
        "a reward with too few scores",
        "train --reward.functions {my_rewards:few: 1}",
        "importing reasoning-gym, the child process of the reward",
    ),
    Mistake("a bad answer pattern", "train --reward.answer-pattern (a"),
    Mistake(
        "a reward server without its key",
        "train --reward.functions {url: 1} --reward.url http://h --reward.url-key-env NO",
    ),
    Mistake("a reward server that is down", "train --reward.functions {url: 1} --reward.url http://127.0.0.1:9"),
    Mistake(
        "a judge that is down",
        "train --reward.functions {judge: 1} --reward.judge-url http://127.0.0.1:9/v1 --reward.judge-model m",
    ),
    Mistake("a mistyped storage profile", "train --storage nsf"),
    Mistake("a storage that cannot be written", "train --storage /proc/storage"),
    Mistake("a storage that is a file", "train --storage notes.txt"),
    Mistake("S3 without keys", "train --storage s3://no-such-bucket-of-rlx/runs", "the network"),
    Mistake("a password in an address", "train --tracking.uri http://me:secret@host"),
    Mistake("a tracking address of no kind", "train --tracking.uri nosuch://x"),
    Mistake("a tracking address that is a word", "train --tracking.uri nonsense"),
    Mistake("W&B without a key", "train --tracking.backends [mlflow,wandb]"),
    Mistake(
        "fewer prompts than a step needs",
        "train --data.source fragen.csv --data.params {} --data.prompt-column frage --data.answer-column antwort",
    ),
    Mistake("a key in the place of its variable's name", "train --reward.url-key-env sk-1"),
    Mistake("a setting of TRL in YAML", "train --config trl.yaml"),
    Mistake("a choice in capitals", "train --algorithm.advantage GRPO"),
    Mistake("a name of the hub without hf:", "train --data.source openai/gsm8k --data.params {}"),
    Mistake("a file as the model", "train --model.path notes.txt"),
    Mistake("trials by Tune's name", "sweep --num-samples 4"),
    Mistake("a folder as the space", "sweep --space empty"),
    Mistake("an MLflow server that is down", "train --tracking.uri http://127.0.0.1:9"),
    Mistake("a Ray cluster that is down", "train --ray-address 127.0.0.1:9"),
    Mistake("resume of nothing", "train --resume nosuch"),
    Mistake("resume of a mistyped run", "train --resume dune"),
    Mistake("a new run with a taken name", "train --name done"),
    Mistake("a start from nothing", "train --from nosuch@best"),
    Mistake("a run without checkpoints as a start", "train --from done"),
    Mistake("--trust without a run", "train --trust"),
    Mistake("a search that there is not", "sweep --search optima"),
    Mistake("a scheduler that there is not", "sweep --scheduler ahsa"),
    Mistake("a metric that is not evaluated", "sweep --metric eval/acuracy"),
    Mistake("no trials", "sweep --trials 0"),
    Mistake("--max-concurrent with a pausing scheduler", "sweep --scheduler hyperband --max-concurrent 2"),
    Mistake("no such space", "sweep --space nosuch.py"),
    Mistake("a space that is no Python", "sweep --space broken.py"),
    Mistake("a space that raises", "sweep --space raising.py", "the space's import of ray.tune"),
    Mistake("a space with a typing error", "sweep --space misspelt.py"),
    Mistake("prompts of a sweep with other columns", "sweep --data.source fragen.csv --data.params {}"),
    Mistake("a new sweep with a taken name", "sweep --name spent"),
    Mistake("resume of no sweep", "sweep --resume nosuch"),
    Mistake("the checkpoints of nothing", "checkpoints nope"),
    Mistake("the export of nothing", "export nope"),
    Mistake("a replay of nothing", "replay nope --step 3"),
    Mistake("a check of nothing", "verify nope"),
    Mistake("a branch of nothing", "whatif nope@3 --steps 2 --set train.actor_lr=1e-5"),
    Mistake("the lineage of nothing", "lineage nope"),
    Mistake("an export into a folder that is there", "export done --out untokenized"),
    Mistake("the analysis of no sweep", "analyze --sweep nosuch"),
    Mistake("the analysis of no storage", "analyze --storage nosuch"),
    Mistake("preferences that are not there", "reward-model --pairs nosuch.jsonl"),
    Mistake("the doctor with a typing error", "doctor --modle.path x"),
]

_CONFIG = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 2048}'
_HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1_000_000, 1_000_000], "data_offsets": [0, 4]}}).encode()
_SPACE = "from ray import tune\n\n\ndef space():\n    "
FILES: dict[str, str | bytes] = {
    "typo.yaml": "train: {stepz: 4}",
    "bad.yaml": "train: {steps: 4",
    "list.yaml": "- train",
    "trl.yaml": "train: {learning_rate: 1.0e-6}",
    "exponent.yaml": "train: {steps: 1e3}",
    "fragen.csv": "frage,antwort\n1 + 1,2\n1 + 2,3\n",
    "unanswered.jsonl": '{"question": "1 + 1"}\n',
    "notes.txt": "1 + 1 = 2\n",
    "empty/.keep": "",
    "untokenized/config.json": _CONFIG,
    "untokenized/model.safetensors": "",
    "weightless/config.json": _CONFIG,
    "weightless/tokenizer.json": "{}",
    "huge/config.json": _CONFIG,
    "huge/tokenizer.json": "{}",
    "huge/model.safetensors": struct.pack("<Q", len(_HEADER)) + _HEADER,
    "my_rewards.py": (
        "def boom(prompts, completions, answers):\n    return [len(completions[9])]\n\n\n"
        "def few(prompts, completions, answers):\n    return [1.0]\n\n\n"
        "def other(questions):\n    return []\n"
    ),
    "broken.py": "def space(:\n",
    "raising.py": f"{_SPACE}return undefined\n",
    "misspelt.py": f'{_SPACE}return {{"train.actor_rl": tune.loguniform(1e-5, 1e-3)}}\n',
    "storage/runs/done/config.yaml": "name: done\n",
    "storage/runs/done/run.json": '{"mlflow_run": null, "key": "k"}',
    "storage/sweeps/spent/sweep.json": "{}",
    "storage/runs/done/result.json": '{"step": 40, "eval/accuracy": 0.5}',
}
"""what each fresh folder has"""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    seconds: float
    computed: float  # seconds of one CPU
    code: int
    output: str  # of stderr
    crowd: float  # processes that wanted each core, at least 1: everything takes so many times longer

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""

    def flaw(self, mistake: Mistake) -> str:
        """What is wrong with it; empty if nothing is."""
        if "Traceback" in self.output:
            return "traceback"
        if self.code == 0:
            return "no error"
        if len([line for line in self.output.splitlines() if "error: " in line]) != 1:
            return "not one line"
        return "slow" if self.seconds > _QUICK_S * self.crowd and not mistake.waits else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", default="", help="the mistakes that have this in their text")
    only = parser.parse_args(argv).only
    chosen = [mistake for mistake in MISTAKES if only in f"{mistake.what}: {mistake.words}"]
    print("| mistake | command | s | CPU s | exit | last line | flaw |\n|---|---|---|---|---|---|---|")
    flaws = 0
    for mistake in chosen:
        outcome = attempt(mistake)
        flaw = outcome.flaw(mistake)
        flaws += bool(flaw)
        print(row(mistake, outcome, flaw), flush=True)
    print(f"\n{len(chosen)} mistakes, {flaws} with a flaw")
    return 1 if flaws else 0


def row(mistake: Mistake, outcome: Outcome, flaw: str) -> str:
    """The line of the table about one mistake."""
    line = outcome.last_line[:_SHOWN].replace("|", "\\|")
    waits = f" ({mistake.waits})" if mistake.waits else ""
    times = f"{outcome.seconds:.1f}{waits} | {outcome.computed:.1f}"
    return f"| {mistake.what} | `{mistake.words}` | {times} | {outcome.code} | {line} | {flaw} |"


def attempt(mistake: Mistake) -> Outcome:
    """Runs the command in a folder of its own; one that takes too long is ended."""
    with tempfile.TemporaryDirectory(prefix="rlx-mistake-") as folder:
        write_files(Path(folder))
        command = [str(Path(sys.executable).with_name("rlx")), *words_of(mistake.words)]
        started, before = time.monotonic(), _computed()
        code, output = _ended(command, folder)
        output = output.replace(folder, ".")
        crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        return Outcome(time.monotonic() - started, _computed() - before, code, output, crowd)


def _ended(command: Sequence[str], folder: str) -> tuple[int, str]:
    """The exit code of a command in a folder, and what it wrote to stderr."""
    # Without cached bytecode every command compiles its imports again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=_LONGEST_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[1]}\nended after {_LONGEST_S:.0f} s"
        return process.returncode, output


def write_files(folder: Path) -> None:
    """Writes `FILES` into a folder."""
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def words_of(text: str) -> list[str]:
    """The words of a command; what stands in braces is one word."""
    quoted = text.replace("{", "'{").replace("}", "}'").replace("(a", "'(a'")
    return shlex.split(quoted)


def _computed() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
