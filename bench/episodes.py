"""What turns cost: tokens per second of episodes with an environment that takes its time, beside single turns.

    python bench/episodes.py [--gpu] [--steps N] [--turns N] [--tokens N] [--wait S] [--SECTION.SETTING VALUE ...]

Two real runs of the same engine: 256 episodes of 8 turns, each answered after 50 ms by an environment in a process of
its own; and as many single completions. Turns are all equally long, and a single completion has as many tokens as an
episode, those of the environment among them. Counted are the tokens that the policy draws, per second of rollout.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import table
import workload

from rlx.cli.options import exit_code
from rlx.config.loading import from_tree, with_overrides
from rlx.config.run import RunConfig

_ROOM = 32
"""tokens that an environment's answer may have, with what the chat template writes around it"""


class Waits:
    """Says a word after each turn, when it has waited."""

    def __init__(self, turns: int, seconds: float) -> None:
        self.turns, self.seconds = turns, seconds

    async def reset(self, row: Any, seed: int) -> str:
        """Begins with the question."""
        await asyncio.sleep(self.seconds)
        return str(row.question)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Waits, whatever was said."""
        await asyncio.sleep(self.seconds)
        self.turns -= 1
        return "on", float(len(action)), not self.turns


SETTINGS: dict[str, Any] = {
    "model.path": "tiny-calculator",  # its chat template takes turns
    "train.prompts_per_step": 64,
    "train.samples_per_prompt": 4,
    "rollout.max_num_seqs": 256,
    "rollout.kv_cache_mib": 256,  # all conversations have room: none is read again because another one is there
    "algorithm.rollout_correction": "tis",  # which min_tokens needs
}


def main(argv: Sequence[str] | None = None) -> int:
    options = workload.parser(__doc__, steps=(3, 5))
    options.add_argument("--turns", type=int, default=8)
    options.add_argument("--tokens", type=int, default=16, help="that the policy draws in a turn")
    options.add_argument("--wait", type=float, default=0.05, help="seconds that the environment takes to answer")

    def script() -> int:
        args, config = workload.read(options, argv, workload.CPU | SETTINGS, workload.GPU | SETTINGS)
        load = os.getloadavg()[0]
        with workload.prepared(config) as (ready, path):
            from rlx.runs import preflight

            tables = preflight.prompt_tables(ready, path)
            episodes = workload.counted_steps(of_turns(ready, args.turns, args.tokens, args.wait), tables, "episodes")
            length = round(workload.median(episodes, "tokens/policy_per_episode"))
            others = round(workload.median(episodes, "tokens/environment_per_episode"))
            single = workload.counted_steps(of_one_turn(ready, length + others), tables, "single")
            table.finish(
                "episodes",
                compared(ready, episodes, single),
                ready,
                args.out,
                load,
                {"turns": args.turns, "tokens of a turn": args.tokens, "wait": args.wait},
            )
        return 0

    return exit_code(script)


def of_turns(config: RunConfig, turns: int, tokens: int, wait: float) -> RunConfig:
    """Episodes of so many turns, each of so many tokens."""
    name = "bench.episodes:Waits"
    environment = {"name": name, "params": {"turns": turns, "seconds": wait}, "max_turns": turns, "turn_tokens": tokens}
    environment |= {"concurrency": 256, "history": "extend"}
    rollout = {"max_tokens": turns * (tokens + _ROOM), "min_tokens": tokens}
    settings: dict[str, Any] = {f"environment.{key}": value for key, value in environment.items()}
    return changed(config, settings | {"reward.functions": {"environment": 1}}, rollout)


def of_one_turn(config: RunConfig, length: int) -> RunConfig:
    """Single completions of exactly so many tokens."""
    return changed(config, {"reward.functions": {"task": 1}}, {"max_tokens": length, "min_tokens": length})


def changed(config: RunConfig, settings: Mapping[str, Any], rollout: Mapping[str, Any]) -> RunConfig:
    """A config with other settings."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    more = {f"rollout.{key}": value for key, value in rollout.items()}
    return from_tree(with_overrides(tree, {**settings, **more}))


def compared(
    config: RunConfig, episodes: Sequence[Mapping[str, Any]], single: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The table."""
    count = config.train.prompts_per_step * config.train.samples_per_prompt
    drawn = workload.median(episodes, "tokens/policy_per_episode"), workload.median(single, "response/length_mean")
    seconds = [workload.median_drawing_s(steps) for steps in (episodes, single)]
    rates = [count * tokens / taken for tokens, taken in zip(drawn, seconds, strict=True)]
    return {
        "episodes, tokens/s": rates[0],
        "single turns, tokens/s": rates[1],
        "episodes / single turns": rates[0] / rates[1],
        "seconds of single turns / of episodes": seconds[1] / seconds[0],
        "turns of an episode": workload.median(episodes, "episode/turns"),
        "tokens of the policy in an episode": workload.median(episodes, "tokens/policy_per_episode"),
        "tokens of the environment": workload.median(episodes, "tokens/environment_per_episode"),
        "rollout of episodes, s": seconds[0],
        "rollout of single turns, s": seconds[1],
    }


if __name__ == "__main__":
    raise SystemExit(main())
