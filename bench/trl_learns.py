"""TRL's GRPOTrainer on a task of rlx: as many samples as a run of rlx draws, all else by TRL's own defaults.

    python bench/trl_learns.py OUT --model.path FOLDER --data.source reasoning_gym:DATASET [--SECTION.SETTING VALUE ...]

Of rlx's settings it takes the model, the task, the answer pattern, the reward (`task`, or `numeric` alone), the longest
response, the seed, and samples a step and steps; a step of TRL has as many samples as one of rlx. The learning rate,
loss, samples for each prompt, KL, precision and clipping are what `GRPOConfig` says without them. It needs a GPU, on
which vLLM runs in TRL's own process.
OUT gets the trained model, which a run of rlx of one step evaluates: `rlx train --model.path OUT --train.steps 1`.
Prints the time from the first step to the last. Left out: evaluating.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from rlx.cli.options import exit_code, parse, settings_parser
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig
from rlx.rewards.functions import extract_answers, numeric

_AT_ONCE = 64  # completions in a forward pass of TRL


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, trains, and returns the exit code."""
    parser = settings_parser(__doc__.splitlines()[0], "OUT [--SECTION.SETTING VALUE ...]")
    parser.add_argument("out", metavar="OUT", help="where to put the trained model")

    def script() -> int:
        args, given = parse(parser, argv or sys.argv[1:])
        config = from_tree(with_overrides({}, given))
        started = time.perf_counter()
        seconds = trained(config, args.out)
        whole = time.perf_counter() - started
        print(f"TRL: {config.train.steps} steps in {seconds:.1f} s, {whole:.1f} s with its start")
        return 0

    return exit_code(script)


def arguments(config: RunConfig) -> dict[str, Any]:
    """What TRL is told beyond its defaults."""
    samples = config.train.prompts_per_step * config.train.samples_per_prompt
    return {
        "per_device_train_batch_size": _AT_ONCE,
        "gradient_accumulation_steps": samples // _AT_ONCE,
        "max_steps": config.train.steps,
        "max_completion_length": config.rollout.max_tokens,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": config.rollout.gpu_memory_utilization,
        "vllm_max_model_length": config.data.max_prompt_tokens + config.rollout.max_tokens,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.seed,
    }


def trained(config: RunConfig, out: str) -> float:
    """Trains and saves; returns the seconds of the steps."""
    warnings.filterwarnings("ignore")
    import reasoning_gym
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    count = config.train.prompts_per_step * config.train.steps
    name = config.data.source.partition(":")[2]
    task = reasoning_gym.create_dataset(name, seed=config.data.seed, size=count, **config.data.params)
    is_numeric = "numeric" in config.reward.functions
    prompts = [[{"role": "user", "content": task[number]["question"]}] for number in range(count)]

    def reward(completions: list[Any], entry: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        answers = [answer or "" for answer in extract_answers(texts, config.reward.answer_pattern)]
        given = zip(answers, entry, strict=True)
        if is_numeric:
            return [numeric(answer, str(task[number]["answer"])) for answer, number in given]
        return [task.score_answer(answer, task[number]) for answer, number in given]

    begun: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            begun.append(time.perf_counter())

    rows = Dataset.from_dict({"prompt": prompts, "entry": list(range(count))})
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    given = GRPOConfig(output_dir=out, **arguments(config))
    trainer = GRPOTrainer(config.model.path, reward, given, rows, processing_class=tokenizer, callbacks=[Watch()])
    trainer.train()
    seconds = time.perf_counter() - begun[0]
    trainer.save_model(out)
    tokenizer.save_pretrained(out)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
