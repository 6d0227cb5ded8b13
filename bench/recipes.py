"""Whether a recipe fits its GPUs, and how long its steps take: with random weights and made-up questions.

    python bench/recipes.py CONFIG [--question TOKENS] [--steps N] [--SECTION.SETTING VALUE ...]

CONFIG is a file such as those in experiments/configs, whose models and data are on a hub that need not be reached. All
settings are those of the file but three: the model has the same shape and random weights (made once, in
storage/models), prompts are digits, and nothing is evaluated. Random weights hardly ever end a response, so nearly all
are as long as `rollout.max_tokens`: the figures are the most that a step takes, of the last one of N. The run is left
before it would write a checkpoint. Left out: whether the recipe learns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import random_models
import table
import workload
from large_model import first_steps, parts

from rlx.cli.options import add_settings, exit_code, parse
from rlx.config.errors import ConfigError, nearest
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig

SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2-0.5b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2-1.5b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen2.5-7B": "qwen2-7b",
}
"""models of recipes, and which of `workload`'s has their shape"""


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("config", metavar="CONFIG", help="YAML file of settings")
    options.add_argument("--question", type=int, default=200, help="tokens of a question, default 200")
    options.add_argument("--steps", type=int, default=3, help="how many, the first ones to warm up; default 3")
    options.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder for the JSON file")
    add_settings(options)

    def script() -> int:
        args, given = parse(options, sys.argv[1:] if argv is None else argv)
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            config = as_here(args.config, given, Path(folder) / "questions.jsonl")
            workload.check_gpu(config)
            write_questions(config, args.question, args.steps)
            with workload.prepared(config) as (ready, path):
                figures = parts(ready, first_steps(ready, path, args.steps)[-1])
                facts = {"recipe": args.config, "tokens of a question": args.question}
                table.finish(f"recipe-{Path(args.config).stem}", figures, ready, args.out, load, facts)
        return 0

    return exit_code(script)


def as_here(file: str, given: Mapping[str, Any], questions: Path) -> RunConfig:
    """The config in a file with a model and questions that are here.

    Raises:
        ConfigError: it cannot be used, or no shape is known for its model.
    """
    tree = read_yaml(file)
    name = given.get("model.path") or tree.get("model", {}).get("path")
    shape = SHAPES.get(name, name)
    if shape not in random_models.SHAPES:
        raise ConfigError(f"model.path {name}: its shape is not known here{nearest(str(name), [*SHAPES])}")
    most = tree.get("data", {}).get("max_prompt_tokens")
    data = {"source": str(questions), "max_prompt_tokens": most} if most else {"source": str(questions)}
    here = tree | {"data": data, "eval": {"every": 0, "num_prompts": 8}}
    return from_tree(with_overrides(here, {**given, "model.path": shape, "name": "recipe"}), file)


def write_questions(config: RunConfig, tokens: int, steps: int) -> None:
    """As many as the steps need, each a text of digits, which are tokens of their own to the model's tokenizer."""
    rng = random.Random(0)
    count = config.train.prompts_per_step * (steps + 2) + config.eval.num_prompts
    with open(config.data.source, "w") as file:
        for _ in range(count):
            text = "".join(rng.choice("0123456789") for _ in range(tokens))
            file.write(json.dumps({"question": text, "answer": "1"}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
