"""Whole runs on episodes in a plain process: metrics, kept completions, and a resume that asks no environment twice."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from episode_cases import HERE, Counting, pool_of
from shared import OnRanks
from test_loop import Outcome, Stopping, trained, unmeasured

from rlx.data.prompts import load_tokenizer
from rlx.rollout.episodes.dialogue import Dialogue
from rlx.rollout.episodes.episode import EpisodeLimits
from rlx.rollout.episodes.player import Draw, Player
from rlx.rollout.fake_engine import FakeEngines
from rlx.samples import reader
from rlx.storage.addresses import open_storage
from rlx.tracking.metrics import meaning
from rlx.training.setup.inputs import WeightSource
from rlx.types import TaskRow

pytestmark = pytest.mark.slow  # three runs, and nothing that other tests do not show in part

SETTINGS: dict[str, Any] = {
    "environment__name": f"{HERE}Counting",
    "environment__max_turns": 3,
    "environment__rewards": "turn",
    "reward__functions": {"environment": 1.0, "length": 0.5},
    "rollout__max_tokens": 60,
    "rollout__max_staleness": 1,
    "data__ptx_source": None,
    "data__ptx_batch": 32,
    "algorithm__ptx_coef": 0.0,
}


class Noting(Counting):
    """Notes what it begins with."""

    begun: list[tuple[str, int]]

    def reset(self, row: TaskRow, seed: int) -> str:
        Noting.begun.append((row.question, seed))
        return super().reset(row, seed)


def engines_of(path: str, weights: WeightSource) -> FakeEngines:
    environments, written = pool_of("test_episode_loop:Noting"), Dialogue(load_tokenizer(path))

    def play(draw: Draw) -> Player:
        return Player(draw, environments, written, EpisodeLimits(3, turn_tokens=6), run_seed=0, checked_share=0.2)

    return FakeEngines(play=play)


def stopped_and_resumed(rank: int, ranks: int, path: str, folder: str) -> list[tuple[Outcome, list[tuple[str, int]]]]:
    """A run to the end, one that stops after two steps, and what continues it; with what environments began with."""
    found = []
    for name, reporter in (("whole", None), ("stopped", Stopping()), ("stopped", None)):
        Noting.begun = []
        run = trained(path, f"{folder}/{name}", reporter, engines_of=partial(engines_of, path), **SETTINGS)
        assert run.engines.player is not None
        run.engines.player.loop.close()
        run.engines.player = None  # a thread and its locks cannot be sent to the test
        found.append((run, list(Noting.begun)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("episodes")


@pytest.fixture(scope="module")
def runs(on_ranks: OnRanks, tiny_model: Path, folder: Path) -> list[tuple[Outcome, list[tuple[str, int]]]]:
    return on_ranks(1, stopped_and_resumed, str(tiny_model), str(folder))[0]


def test_a_resume_is_exact_and_asks_no_environment_twice(runs: list[tuple[Outcome, list[tuple[str, int]]]]) -> None:
    (whole, all_begun), (first, begun), (second, begun_later) = runs
    steps = {row["step"]: unmeasured(row) for row in (*first.reporter.metrics, *second.reporter.metrics)}
    assert steps == {row["step"]: unmeasured(row) for row in whole.reporter.metrics}
    # The round that was generated ahead is in the checkpoint: its 8 episodes are not had again. Repeated ones are.
    assert sorted({*begun, *begun_later}) == sorted(set(all_begun))
    assert len({*begun_later} & {*begun}) <= 3  # the questions of the evaluation


def test_the_metrics_of_episodes(runs: list[tuple[Outcome, list[tuple[str, int]]]]) -> None:
    row = runs[0][0].reporter.metrics[-1]
    names = [name for name in row if name.startswith("episode/")]
    assert len(names) == 12 and all(map(meaning, [*names, "tokens/policy_per_episode", "time/environment"]))
    assert row["episode/turns"] == 3 and row["episode/contexts"] == 1 and row["episode/tool_calls"] == 0
    kinds = {f"episode/{kind}_fraction" for kind in ("failed", "hung", "raised", "died", "unrepeatable")}
    assert {row[name] for name in kinds | {"episode/retries", "eval/failed_fraction"}} == {0}
    assert row["tokens/policy_per_episode"] == row["response/length_mean"]
    assert 3 <= row["tokens/policy_per_episode"] <= 18 and row["tokens/environment_per_episode"] > 12
    assert row["reward/environment"] == 0.5 + 1.0 + 1.5


def test_episodes_are_kept_with_the_turns_of_their_tokens(
    runs: list[tuple[Outcome, list[tuple[str, int]]]], folder: Path
) -> None:
    run = open_storage(str(folder / "whole"), create=False)
    step = reader.kept_steps(run)[-1]
    rows = reader.completions(reader.read(run, step))
    for row in rows:
        assert row.turns is not None and {-1, 0, 1, 2} == set(row.turns)
        played = row.played
        assert played and [turn.observation.text for turn in played.turns] == ["turn 1", "turn 2", "turn 3"]
        assert row.question in row.prompt and "turn 2" in "".join(row.tokens)


class Unready(Counting):
    def reset(self, row: TaskRow, seed: int) -> str:
        raise LookupError("no such row")


def failing_engines(path: str, weights: WeightSource) -> FakeEngines:
    environments, written = pool_of("test_episode_loop:Unready"), Dialogue(load_tokenizer(path))
    return FakeEngines(play=lambda draw: Player(draw, environments, written, EpisodeLimits(3, turn_tokens=6), 0))


def messages_of_failing(rank: int, ranks: int, path: str, folder: str) -> list[str]:
    run = trained(path, folder, engines_of=partial(failing_engines, path), **SETTINGS)
    return [text for text in run.reporter.messages if "failed" in text]


def test_a_run_whose_episodes_all_fail_says_so_once(on_ranks: OnRanks, tiny_model: Path, tmp_path: Path) -> None:
    assert on_ranks(1, messages_of_failing, str(tiny_model), str(tmp_path))[0] == [
        "all episodes of the evaluation after step 0 failed: rlx samples RUN --held-out shows why",
        "all episodes of step 1 failed, nothing is learnt from them: rlx samples RUN shows why",
    ]
