"""What turns cost vLLM itself, without rlx: 256 conversations of 8 turns beside single turns of the same whole length.

    python bench/turns.py MODEL [--turns 8] [--tokens 16] [--between 5] [--wait 0] [--block 32] [--rounds 3]

On CPUs, with one thread. No text is made, no log-probability is asked for; environments are a pause of `--wait` seconds
before each turn and after the last. `bench/episodes.py` cannot be faster than this while all episodes take their turns
together. MODEL is a Hugging Face folder; the prompts
are drawn from its vocabulary. Left out: resumable requests of vLLM, which keep the state of one seed for all turns.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from typing import Any

from rlx.cli.options import exit_code
from rlx.config.errors import ConfigError
from rlx.models.folder import is_model_folder

_COUNT, _OPENING = 256, 40
"""conversations, and tokens of their first message"""
_LOWEST, _HIGHEST = 10, 60
"""tokens that prompts are drawn from"""


def main() -> int:
    """Prints a line per round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder")
    for name, default in (("turns", 8), ("tokens", 16), ("between", 5), ("block", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that environments take to answer")

    def script() -> int:
        args = parser.parse_args()
        if not is_model_folder(args.model, "MODEL"):
            raise ConfigError(f"MODEL {args.model}: expected a folder")
        compare(args)
        return 0

    return exit_code(script)


def compare(args: argparse.Namespace) -> None:
    """Times both, round by round."""
    engine, rng, names = built(args.model, args.block), random.Random(0), itertools.count()
    whole = args.turns * args.tokens + (args.turns - 1) * args.between

    def tokens(count: int) -> list[int]:
        return [rng.randrange(_LOWEST, _HIGHEST) for _ in range(count)]

    for _ in range(args.rounds):
        started = time.perf_counter()
        drawn(engine, [tokens(_OPENING) for _ in range(_COUNT)], whole, names)
        single, started = time.perf_counter() - started, time.perf_counter()
        prompts = [tokens(_OPENING) for _ in range(_COUNT)]
        time.sleep(args.wait)
        for _ in range(args.turns):
            answers = drawn(engine, prompts, args.tokens, names)
            pairs = zip(prompts, answers, strict=True)
            prompts = [prompt + answer + tokens(args.between) for prompt, answer in pairs]
            time.sleep(args.wait)
        turns = time.perf_counter() - started
        print(f"{whole} tokens in one turn {single:.2f} s, in {args.turns} turns {turns:.2f} s: {single / turns:.3f}")


def built(model: str, block: int) -> Any:
    """vLLM's engine in this process, as rlx starts it."""
    import os

    from rlx.rollout.vllm_engine import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(CPU_ENVIRONMENT | ENVIRONMENT)
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    sizes = {"block_size": block, "max_model_len": 512, "max_num_seqs": _COUNT, "kv_cache_memory_bytes": 256 << 20}
    fixed: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    arguments = EngineArgs(model=model, disable_log_stats=True, **sizes, **fixed)
    return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)


def drawn(engine: Any, prompts: list[list[int]], count: int, names: Any) -> list[list[int]]:
    """Exactly so many tokens after each prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=count,
        min_tokens=count,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    asked = [str(next(names)) for _ in prompts]
    for name, prompt in zip(asked, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished}
    return [found[name] for name in asked]


if __name__ == "__main__":
    sys.exit(main())
