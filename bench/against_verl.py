"""Whole steps of rlx beside those of veRL's PPO trainer: response tokens per second of the same work on the same GPUs.

    python bench/against_verl.py --gpu [--verl FOLDER] [--ppo | --ahead] [--asleep] [--ways WAY ...] [--SETTING VALUE]

The same model, prompts, completions for each, sampling, optimizer steps, precision and micro-batch budget; the policy's
learning rate is 0. Without --ppo it is GRPO without KL; with it PPO with critic, reference and KL in the reward, in 2
epochs of 2 mini-batches. rlx runs before and after veRL 0.9.1, which runs once in each way of `WAYS`, by its own
command in processes of its own; its engines and its trainer take turns on each GPU, both in its memory at once, or with
--asleep one after the other, as a model needs that fills it. With --ahead, on two GPUs or more, both generate one step
ahead, veRL by its asynchronous trainer (separate_async). It has as many GPUs as rlx. It asks for other versions than
rlx, so it lies in a folder of its own with what only it needs (docs/performance.md), which `--verl` names. What it is
given is in verl_settings.py. Its own ways stay: no seeds for requests, entropies with the old log-probabilities. So the
draws differ, and with them the lengths of a model that ends its responses by itself (`--model.path qwen2-0.5b-ending`):
tokens per second are of each side's own mean length, which the table has.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import alike
import table
import workload
from rollout import described
from verl_settings import AGGREGATIONS, ASLEEP, ENVIRONMENTS, FIXED, WAYS, models, overrides, wider

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.runs import preflight

_REWARD = (
    "def score(data_source, solution_str, ground_truth, extra_info=None, **_):\n    return float(len(solution_str))\n"
)
PPO: dict[str, Any] = {
    "algorithm.advantage": "gae",
    "algorithm.kl_coef": 0.05,
    "model.critic": "separate",
    "model.reference": "copy",
    "train.ppo_epochs": 2,
    "train.micro_batch_tokens": 16_384,
}
"""rlx's settings with --ppo"""
_NUMBER = re.compile(r"(\S+):(?:np\.\w+\()?(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)")
_LOST = ("EngineDeadError", "hit an exception", "Error executing job")
_PATIENCE_S = 5.0
"""for the rest of its words after one of these, after which it would wait for ever"""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(5, 5))
    options.add_argument("--verl", help="folder that veRL is installed to, if it is not beside rlx")
    options.add_argument("--ppo", action="store_true", help="PPO with critic, reference and KL; else GRPO without KL")
    options.add_argument("--ahead", action="store_true", help="GRPO, one step ahead; else on policy")
    options.add_argument("--asleep", action="store_true", help="veRL's engines sleep while it trains")
    options.add_argument("--ways", nargs="+", choices=list(WAYS), help="how veRL's models are set; default: all")
    words = sys.argv[1:] if argv is None else argv

    def script() -> int:
        own = (PPO if "--ppo" in words else {}) | (alike.AHEAD if "--ahead" in words else {})
        args, config = workload.read(options, words, gpu=workload.GPU | own)
        check(config, args.verl, args.ahead)
        load, out = os.getloadavg()[0], Path(args.out)
        with workload.prepared(config) as (ready, path):
            tables = preflight.prompt_tables(ready, path)
            prompts = alike.prompts(ready, path, tables)
            ours = alike.by_rlx(ready, tables)
            theirs = in_each_way(ready, path, prompts, args, out)
            again = alike.by_rlx(ready, tables, "k0-again")
        figures = ours | {"rlx, after / before": again[alike.RLX] / ours[alike.RLX]} | compared(ours, again, theirs)
        facts = described(ready) | alike.DRAWS | {"veRL": version(args.verl)}
        name = "against_verl" + ("_ppo" if args.ppo else "") + ("_ahead" if args.ahead else "")
        table.finish(name, figures, ready, args.out, load, facts)
        return 0

    return exit_code(script)


def check(config: RunConfig, folder: str | None, is_ahead: bool = False) -> None:
    """ConfigError for a config that veRL cannot run alike here, and where there is no veRL that starts."""
    if not config.scaling.use_gpu:
        raise ConfigError("veRL needs a GPU: add --gpu")
    alike.check(config, "veRL", has_ppo=not is_ahead, has_gpus=True, is_ahead=is_ahead)
    if is_ahead and alike.gpus(config) < config.scaling.num_workers + config.rollout.num_engines:
        raise ConfigError("--ahead needs a GPU for each worker and each engine, as veRL's asynchronous trainer does")
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype {config.model.dtype}: veRL's trainer computes in bfloat16")
    if config.algorithm.aggregation not in AGGREGATIONS:
        raise ConfigError(f"algorithm.aggregation {config.algorithm.aggregation}: veRL has {', '.join(AGGREGATIONS)}")
    if not version(folder):
        missing = f"--verl {folder}: there is no veRL in it" if folder else "veRL is not installed here"
        raise ConfigError(f"{missing}; docs/performance.md says how, and --verl where it is")
    if why := why_not(folder):
        raise ConfigError(f"veRL does not start: {why}")


def version(folder: str | None) -> str | None:
    """Of veRL, in the folder or beside rlx."""
    found = metadata.distributions(name="verl", path=[folder] if folder else sys.path)
    return next((one.version for one in found), None)


def why_not(folder: str | None) -> str:
    """Why veRL does not start here, such as a package that is missing; empty if it does."""
    asked = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job"]  # it prints its settings and ends
    tried = subprocess.run(asked, capture_output=True, text=True, errors="replace", env=environment(folder))
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


def in_each_way(
    config: RunConfig, path: str, prompts: alike.Prompts, args: Any, out: Path
) -> dict[str, list[dict[str, float]]]:
    """The metrics of veRL's counted steps in each way that it can run.

    Raises:
        RuntimeError: it ended early in all.
    """
    found = {}
    for way in args.ways or WAYS:
        try:
            found[way] = by_verl(config, path, prompts, args.verl, out, way, args.asleep)
        except RuntimeError as error:
            workload.say(str(error))
    if not found:
        raise RuntimeError(f"veRL ended early in every way; what it printed is in {out}")
    return found


def compared(
    before: Mapping[str, float], after: Mapping[str, float], ways: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, float]:
    """veRL's figures, medians of the counted steps, those of its fastest way in full, and rlx's by them."""
    rates = {way: _median(steps, "tokens/s") for way, steps in ways.items()}
    best = max(rates, key=rates.__getitem__)
    parts = [name for name in ways[best][0] if name.startswith("timing_s/")]
    ours = {alike.RLX: (before[alike.RLX] + after[alike.RLX]) / 2}
    return (
        {f"veRL, {way}, tokens/s": rate for way, rate in rates.items()}
        | {f"veRL, {part.removeprefix('timing_s/')}, s": _median(ways[best], part) for part in parts}
        | {"mean response of veRL, tokens": _median(ways[best], "response_length/mean")}
        | alike.ratios(ours, f"veRL, {best}", rates[best])
    )


def _median(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(each.get(name, 0.0) for each in steps)


def by_verl(
    config: RunConfig, path: str, prompts: alike.Prompts, folder: str | None, out: Path, way: str, asleep: bool = False
) -> list[dict[str, float]]:
    """The metrics of veRL's counted steps in a way; all that it prints goes to OUT/verl-WAY.log.

    Raises:
        RuntimeError: it ended early.
    """
    wanted, steps = config.train.steps, list[dict[str, float]]()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, open(log_file(out, way), "w", buffering=1) as log:
        given = FIXED | (ASLEEP if asleep else {}) | overrides(config, wider(way, workload.gpu_gib()))
        given |= models(config, way) | files(Path(place), path, prompts)
        own = environment(folder) | ENVIRONMENTS.get(way, {})
        with closing(printed([f"{key}={value}" for key, value in given.items()], own)) as lines:
            while len(steps) < wanted and (line := next(lines, "")):
                log.write(line)
                if found := metrics(line, alike.completions(config)):
                    steps.append(found)
                    rate = f"{found['timing_s/step']:.2f} s, {found['tokens/s']:,.0f} tokens/s"
                    workload.say(f"veRL, {way}: step {len(steps)} of {wanted}: {rate}")
    if len(steps) < wanted:
        raise RuntimeError(f"veRL, {way}, ended after {len(steps)} of {wanted} steps; what it printed is in {log.name}")
    return steps[workload.WARM :]


def log_file(out: Path, way: str) -> Path:
    """For what veRL prints."""
    return out / f"verl-{re.sub('[^a-z]+', '-', way)}.log"


def metrics(line: str, completions: int) -> dict[str, float]:
    """Of a step, from the line that veRL prints of it; empty for any other line."""
    if " - timing_s/step:" not in line:
        return {}
    found = {name: float(value) for name, value in _NUMBER.findall(line)}
    return found | {"tokens/s": found["response_length/mean"] * completions / found["timing_s/step"]}


def printed(given: Sequence[str], own: Mapping[str, str]) -> Generator[str, None, None]:
    """Runs veRL in an environment of its own and gives its lines as they come; nothing of it is left when this ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "verl.trainer.main_ppo", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=own,
        start_new_session=True,
    )
    end, is_lost = threading.Timer(_PATIENCE_S, os.killpg, (process.pid, signal.SIGKILL)), False
    try:
        for line in process.stdout or ():
            if not is_lost and any(word in line for word in _LOST):
                is_lost = True
                end.start()
            yield line
    finally:
        end.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Ray's processes too
        process.wait()


def environment(folder: str | None) -> dict[str, str]:
    """What this process was started with, without what rlx has set since and any Ray that runs, and where veRL is."""
    lines = Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    given = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("RAY_ADDRESS="))
    paths = [folder and os.path.abspath(folder), str(Path(__file__).parent), given.get("PYTHONPATH")]
    own = {"VERL_USE_EXTERNAL_MODULES": "verl_without_trl,verl_varlen", "PYTHONUNBUFFERED": "1"}
    own["VERL_LOGGING_LEVEL"] = "WARNING"  # one of its notes with --ahead calls the logger wrongly, and would end it
    return given | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def files(place: Path, path: str, prompts: alike.Prompts) -> dict[str, Path]:
    """The model, the prompts and the reward function as veRL wants them, by the names of their settings."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = model_folder(place / "model", path, tokenizer)
    texts = alike.texts(tokenizer, prompts)
    columns = {
        "data_source": ["bench"] * len(texts),
        "prompt": [[{"role": "user", "content": text}] for text in texts],
        "reward_model": [{"style": "rule", "ground_truth": ""}] * len(texts),
        "extra_info": [{"index": index} for index in range(len(texts))],
    }
    pq.write_table(pa.table(columns), place / "prompts.parquet")
    (place / "reward.py").write_text(_REWARD)
    return {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": place / "prompts.parquet",
        "data.val_files": place / "prompts.parquet",
        "reward.custom_reward_function.path": place / "reward.py",
        "trainer.default_local_dir": place / "checkpoints",
        "hydra.run.dir": place,
    }


def model_folder(folder: Path, path: str, tokenizer: Any) -> Path:
    """The same model and its tokenizer, which gets a chat template that leaves a prompt as it is, two tokens that veRL
    looks up for every Qwen2 and that no prompt has, and what `filled` adds."""
    from transformers import AutoConfig

    missing = [text for text in ("<|im_end|>", "\n") if len(tokenizer.encode(text, add_special_tokens=False)) != 1]
    tokenizer.add_tokens(missing, special_tokens=True)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(filled(file.read_text(), tokenizer.get_vocab(), AutoConfig.from_pretrained(path).vocab_size))
    for each in Path(path).iterdir():
        if not (folder / each.name).exists():
            (folder / each.name).symlink_to(each.resolve())
    return folder


def filled(tokenizer: str, known: Mapping[str, int], size: int) -> str:
    """A tokenizer's JSON with as many tokens as the model has outputs.

    veRL's engine draws none that the tokenizer lacks: it would normalise over few tokens, its trainer over all.

    Args:
        known: all of its tokens, with their ids.
        size: how many outputs the model has.
    """
    content, ids = json.loads(tokenizer), set(known.values())
    # Those that were added stand there as well, since they would get other ids otherwise.
    content["model"]["vocab"] = dict(known) | {f"<{i}>": i for i in range(size) if i not in ids}
    return json.dumps(content)


if __name__ == "__main__":
    sys.exit(main())
