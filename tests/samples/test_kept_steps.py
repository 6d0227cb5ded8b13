"""The episodes of kept steps: which are read again, and from which files."""

from pathlib import Path

import pytest
from sample_cases import Letters, scored

from rlx.config.errors import ConfigError
from rlx.samples.columns import Kind, StepCompletions
from rlx.samples.episodes import KeptSteps
from rlx.samples.writer import CompletionWriter, Keeping
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.types import Completion, Episode, KeptEpisode, Observation, ScoredCompletion, Turn

GAME = '{"name": "game"}'


def played(number: int, failure: str = "") -> ScoredCompletion:
    """The case of that number as an episode of one turn, begun with the weights of its version."""
    row = scored(number)
    own: Completion = row.completion
    turn = Turn(0, len(own.token_ids), own.version, Observation(reward=0.5, done=True))
    episode = Episode(Observation(({"role": "user", "content": "go"},)), (turn,), (), 0.5, failure)
    return ScoredCompletion(
        Completion(own.prompt, own.sample, own.token_ids, own.logprobs, True, own.version, episode),
        *(row.score, row.is_correct, row.scores_by_function),
    )


def written(folder: Path, environment: str = GAME, seed: int = 3) -> Storage:
    """A run with an evaluation before the first step, and steps 1 to 3; one episode of each has failed."""
    run = open_storage(str(folder))
    writer = CompletionWriter(run, Keeping(1.0, seed, 0, 1, environment), Letters(), pytest.fail)
    rows = [played(0), played(1, "it raised"), played(2)]
    writer.keep(StepCompletions(Kind.HELD_OUT, 0, 8, [played(3)]))
    for step in (1, 2, 3):
        writer.keep(StepCompletions(Kind.TRAINING, step, 8, rows[: 1 + step % 3]))
        writer.wait()
    writer.close()
    return run


def test_episodes_are_read_by_their_names_but_those_that_failed(tmp_path: Path) -> None:
    found = KeptSteps(written(tmp_path), after=-1).episodes(GAME, 3)
    assert sorted(found) == ["3.11.0", "3.11.1", "4.10.0"]
    own = played(2).completion
    assert own.episode and found["3.11.0"] == KeptEpisode("question 1", "yes", own.token_ids, own.episode)


@pytest.mark.parametrize(
    ("after", "until", "names"),
    [(0, None, ["3.11.0", "4.10.0"]), (0, 1, ["4.10.0"]), (-1, 0, ["3.11.1"]), (3, None, [])],
)
def test_steps_outside_are_left_out(tmp_path: Path, after: int, until: int | None, names: list[str]) -> None:
    assert sorted(KeptSteps(written(tmp_path), after, until).episodes(GAME, 3)) == names


@pytest.mark.parametrize(("environment", "seed"), [('{"name": "other"}', 3), (GAME, 4), ("", 3)])
def test_episodes_of_another_environment_or_seed_are_left_out(tmp_path: Path, environment: str, seed: int) -> None:
    run = written(tmp_path, environment, seed)
    assert KeptSteps(run, after=-1).episodes(GAME, 3) == {} != KeptSteps(run, after=-1).episodes(environment, seed)


def test_a_run_without_a_checkpoint_does_all_steps_again(tmp_path: Path) -> None:
    assert KeptSteps.since_checkpoint(written(tmp_path)).after == -1
    assert KeptSteps.since_checkpoint(open_storage(str(tmp_path / "new"))).episodes(GAME, 3) == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = written(tmp_path)
    file = tmp_path / "completions" / "step_000002-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"step_000002-00000-of-00001\.parquet is damaged"):
        KeptSteps(run, after=1).episodes(GAME, 3)
