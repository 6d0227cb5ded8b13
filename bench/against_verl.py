"""Whole steps of rlx beside those of veRL's PPO trainer: response tokens per second of the same work on the same GPUs.

    python bench/against_verl.py --gpu [--verl FOLDER] [--ppo] [--asleep] [--ways WAY ...] [--SETTING VALUE ...]

The same model, prompts, completions for each, sampling, optimizer steps, precision and micro-batch budget; the policy's
learning rate is 0. Without --ppo it is GRPO without KL; with it PPO with critic, reference and KL in the reward, in 2
epochs of 2 mini-batches. rlx runs before and after veRL 0.9.1, which runs once in each way of `WAYS`, by its own
command in processes of its own; its engines and its trainer take turns on each GPU, both in its memory at once, or with
--asleep one after the other, as a model needs that fills it. It has as many GPUs as rlx. It asks
for other versions than rlx, so it lies in a folder of its own with what only it needs (docs/performance.md), which
`--verl` names. What it is given is in `FIXED` and `WAYS`, and what follows from rlx's settings in `overrides`. Its own
ways stay: no seeds for requests, entropies with the old log-probabilities, vLLM's model runner as vLLM chooses.
Changed are how it waits for completions (verl_sampler.py), that it looks for TRL (verl_without_trl.py), and its
attention over packed rows, which would need flash-attn (verl_varlen.py). Left out: models that end a response by
themselves, as veRL's are as long as may be; and veRL's asynchronous trainers.
"""

from __future__ import annotations

import json
import math
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

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.config.run import RunConfig
from rlx.runs import preflight

_REWARD = (
    "def score(data_source, solution_str, ground_truth, extra_info=None, **_):\n    return float(len(solution_str))\n"
)
_AGGREGATIONS = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
FIXED: dict[str, Any] = {
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": True,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "+actor_rollout_ref.actor.optim.override_optimizer_config.fused": True,
    "actor_rollout_ref.model.use_fused_kernels": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 16_384,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
    # It forbids tokens that the tokenizer does not have; among the few left the end would come often.
    "actor_rollout_ref.rollout.ignore_eos": True,
    "data.shuffle": False,
    "data.dataloader_num_workers": 0,
    "reward.custom_reward_function.name": "score",
    "trainer.logger": "[console]",
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.total_epochs": 1,
    "trainer.v1.sampler.custom_sampler.path": Path(__file__).parent / "verl_sampler.py",
    "trainer.v1.sampler.custom_sampler.name": "Attentive",
    "ray_kwargs.ray_init.num_cpus": 32,  # it reserves 20, more than some machines have
    "hydra.output_subdir": "null",
}
"""veRL's settings that no setting of rlx decides: for the same work, and for nothing but the work"""
ASLEEP: dict[str, Any] = {
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": True,
}
"""in their place with --asleep: engines leave the GPU to the trainer, which gathers weights for each pass"""
_CRITIC: dict[str, Any] = {
    "critic.strategy": "fsdp2",
    "critic.fsdp.model_dtype": "fp32",
    "critic.fsdp.reshard_after_forward": False,
    "critic.fsdp.use_no_sync_for_gradient_accumulation": True,
    "critic.use_dynamic_bsz": True,
    "+critic.optim.override_optimizer_config.fused": True,
}
_PACKED = {"use_remove_padding": True, "+override_config.attn_implementation": "verl_varlen"}
_PADDED = {"use_remove_padding": False, "+override_config.attn_implementation": "sdpa"}
_TRITON, _TORCH = ({"fused_kernel_options.impl_backend": head} for head in ("triton", "torch"))
WAYS: dict[str, dict[str, Any]] = {
    "packed, liger": _PACKED | _TRITON | {"use_liger": True},
    "packed": _PACKED | _TRITON,
    "packed, torch's head": _PACKED | _TORCH,
    "padded": _PADDED | _TORCH,  # Triton's head fails with padding
}
"""settings of veRL's models that no setting of rlx decides, and that cost or gain it speed"""
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
_WIDER = 2
"""times the tokens of a micro-batch where no gradients are kept; with 4 it runs out of 80 GiB"""
_PATIENCE_S = 5.0
"""for the rest of its words after one of these, after which it would wait for ever"""


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(5, 5))
    options.add_argument("--verl", help="folder that veRL is installed to, if it is not beside rlx")
    options.add_argument("--ppo", action="store_true", help="PPO with critic, reference and KL; else GRPO without KL")
    options.add_argument("--asleep", action="store_true", help="veRL's engines sleep while it trains")
    options.add_argument("--ways", nargs="+", choices=list(WAYS), help="how veRL's models are set; default: all")
    words = sys.argv[1:] if argv is None else argv

    def script() -> int:
        args, config = workload.read(options, words, gpu=workload.GPU | (PPO if "--ppo" in words else {}))
        check(config, args.verl)
        load, out = os.getloadavg()[0], Path(args.out)
        with workload.prepared(config) as (ready, path):
            tables = preflight.prompt_tables(ready, path)
            prompts = alike.prompts(ready, path, tables)
            ours = alike.by_rlx(ready, tables)
            theirs = in_each_way(ready, path, prompts, args, out)
            again = alike.by_rlx(ready, tables, "k0-again")
        figures = ours | {"rlx, after / before": again[alike.RLX] / ours[alike.RLX]} | compared(ours, again, theirs)
        facts = described(ready) | {"veRL": version(args.verl)}
        table.finish("against_verl_ppo" if args.ppo else "against_verl", figures, ready, args.out, load, facts)
        return 0

    return exit_code(script)


def check(config: RunConfig, folder: str | None) -> None:
    """ConfigError for a config that veRL cannot run alike here, and where there is no veRL."""
    if not config.scaling.use_gpu:
        raise ConfigError("veRL needs a GPU: add --gpu")
    alike.check(config, "veRL", has_ppo=True, has_gpus=True)
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype {config.model.dtype}: veRL's trainer computes in bfloat16")
    if config.algorithm.aggregation not in _AGGREGATIONS:
        raise ConfigError(f"algorithm.aggregation {config.algorithm.aggregation}: veRL has {', '.join(_AGGREGATIONS)}")
    if not version(folder):
        missing = f"--verl {folder}: there is no veRL in it" if folder else "veRL is not installed here"
        raise ConfigError(f"{missing}; docs/performance.md says how, and --verl where it is")


def version(folder: str | None) -> str | None:
    """Of veRL, in the folder or beside rlx."""
    found = metadata.distributions(name="verl", path=[folder] if folder else sys.path)
    return next((one.version for one in found), None)


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
        given = FIXED | (ASLEEP if asleep else {}) | overrides(config) | models(config, way)
        given |= files(Path(place), path, prompts)
        with closing(printed([f"{key}={value}" for key, value in given.items()], folder)) as lines:
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


def printed(given: Sequence[str], folder: str | None) -> Generator[str, None, None]:
    """Runs veRL and gives its lines as they come; nothing of it is left when this ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "verl.trainer.main_ppo", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(folder),
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
    """The same model, with its tokenizer, which gets a chat template that leaves a prompt as it is, and two tokens that
    veRL looks up for every Qwen2 and that no prompt has."""
    missing = [text for text in ("<|im_end|>", "\n") if len(tokenizer.encode(text, add_special_tokens=False)) != 1]
    tokenizer.add_tokens(missing, special_tokens=True)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    for each in Path(path).iterdir():
        if not (folder / each.name).exists():
            (folder / each.name).symlink_to(each.resolve())
    return folder


def overrides(config: RunConfig) -> dict[str, Any]:
    """veRL's settings that follow from rlx's, for the same work."""
    train, chosen, tokens = config.train, config.rollout, config.train.micro_batch_tokens
    actor = {
        "fsdp_config.use_torch_compile": config.resolved_compile,
        "use_torch_compile": config.resolved_compile,
        "optim.lr": train.actor_lr,
        "optim.weight_decay": train.weight_decay,
        "optim.betas": json.dumps(train.adam_betas),
        "grad_clip": train.max_grad_norm,
        "ppo_mini_batch_size": train.prompts_per_step // train.num_minibatches,
        "ppo_epochs": train.ppo_epochs,
        "ppo_max_token_len_per_gpu": tokens,
        "loss_agg_mode": _AGGREGATIONS[config.algorithm.aggregation],
    }
    rollout = {
        "n": train.samples_per_prompt,
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "dtype": config.model.dtype,
        "gpu_memory_utilization": chosen.gpu_memory_utilization,
        "max_num_seqs": chosen.max_num_seqs,
        "enforce_eager": chosen.enforce_eager,
        "max_model_len": config.data.max_prompt_tokens + chosen.max_tokens,
        "log_prob_max_token_len_per_gpu": _WIDER * tokens,
    }
    return (
        {f"actor_rollout_ref.actor.{key}": value for key, value in actor.items()}
        | {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}
        | {
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _WIDER * tokens,
            "data.train_batch_size": train.prompts_per_step,
            "data.max_prompt_length": config.data.max_prompt_tokens,
            "data.max_response_length": chosen.max_tokens,
            "trainer.total_training_steps": train.steps,
            "trainer.n_gpus_per_node": math.ceil(alike.gpus(config)),
        }
        | algorithm(config)
    )


def algorithm(config: RunConfig) -> dict[str, Any]:
    """GRPO without KL, or PPO with a critic and the KL in the reward."""
    chosen, train = config.algorithm, config.train
    if chosen.advantage == "grpo":
        return {"algorithm.adv_estimator": "grpo"}
    critic = {
        "optim.lr": train.critic_lr,
        "optim.weight_decay": train.weight_decay,
        "optim.betas": json.dumps(train.adam_betas),
        "grad_clip": train.max_grad_norm,
        "ppo_max_token_len_per_gpu": train.micro_batch_tokens,
        "forward_max_token_len_per_gpu": _WIDER * train.micro_batch_tokens,
    }
    kl = {"use_kl_in_reward": True, "kl_ctrl.kl_coef": chosen.kl_coef}
    gae = {"adv_estimator": "gae", "gamma": chosen.gamma, "lam": chosen.gae_lambda}
    return (
        _CRITIC
        | {f"critic.{key}": value for key, value in critic.items()}
        | {f"algorithm.{key}": value for key, value in (gae | kl).items()}
    )


def models(config: RunConfig, way: str) -> dict[str, Any]:
    """How policy, reference and critic are computed. Fused heads are for logits, which a critic has none of."""
    shared = WAYS[way] | {"enable_gradient_checkpointing": config.train.gradient_checkpointing}
    critic = {key: value for key, value in shared.items() if "fused" not in key}
    return {_below("actor_rollout_ref.model", key): value for key, value in shared.items()} | {
        _below("critic.model", key): value for key, value in critic.items()
    }


def _below(section: str, key: str) -> str:
    """Hydra's name of a setting; a plus in front means that its defaults lack it."""
    return f"+{section}.{key[1:]}" if key.startswith("+") else f"{section}.{key}"


if __name__ == "__main__":
    sys.exit(main())
