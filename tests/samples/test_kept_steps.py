"""The episodes of steps that are done again: which are read, and from which files."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_cases import Letters, scored

from rlx.config.sections.rollout import EnvironmentConfig
from rlx.samples.columns import REDONE, Kind, StepCompletions, made_with
from rlx.samples.episodes import KnownEpisodes
from rlx.samples.writer import CompletionWriter, Keeping, discard_after
from rlx.storage.addresses import open_storage
from rlx.storage.filesystem import Storage
from rlx.types import Completion, Episode, Observation, ScoredCompletion, Turn

GAME = made_with(EnvironmentConfig(name="guess_number"), {}, 3)
OTHERS = (
    made_with(EnvironmentConfig(name="guess_number", max_turns=2), {}, 3),
    made_with(EnvironmentConfig(name="guess_number"), {"thinks": True}, 3),
    made_with(EnvironmentConfig(name="guess_number"), {}, 4),
    {},
)


def played(number: int, failure: str = "") -> ScoredCompletion:
    """The case of that number as an episode of one turn, begun with the weights of its version."""
    row = scored(number)
    own: Completion = row.completion
    turn = Turn(0, len(own.token_ids), own.version, Observation(reward=0.5, done=True))
    episode = Episode(Observation(({"role": "user", "content": "go"},)), (turn,), (), 0.5, failure, None, f"e{number}")
    return ScoredCompletion(
        Completion(own.prompt, own.sample, own.token_ids, own.logprobs, True, own.version, episode),
        *(row.score, row.is_correct, row.scores_by_function),
    )


def written(folder: Path, metadata: Mapping[bytes, bytes] = GAME) -> Storage:
    """A run with an evaluation before the first step, and steps 1 to 3; one episode of each has failed."""
    run = open_storage(str(folder))
    writer = CompletionWriter(run, Keeping(1.0, 3, 0, 1, metadata), Letters(), pytest.fail)
    rows = [played(0), played(1, "it raised"), played(2)]
    writer.keep(StepCompletions(Kind.HELD_OUT, 0, 8, [played(3)]))
    for step in (1, 2, 3):
        writer.keep(StepCompletions(Kind.TRAINING, step, 8, rows[: 1 + step % 3]))
        writer.wait()
    writer.close()
    return run


def read(run: Storage, after: int = -1, until: int = 99, metadata: Mapping[bytes, bytes] = GAME) -> list[str]:
    return sorted(KnownEpisodes.of_steps(run, after, until).read(metadata, pytest.fail))


def test_episodes_are_read_by_what_they_began_with_but_those_that_failed(tmp_path: Path) -> None:
    found = KnownEpisodes.of_steps(written(tmp_path), -1, 3).read(GAME, pytest.fail)
    assert sorted(found) == ["e0", "e2", "e3"]
    own = played(2).completion
    assert (tuple(found["e2"].token_ids), found["e2"].episode) == (own.token_ids, own.episode)


@pytest.mark.parametrize(
    ("after", "until", "names"), [(0, 99, ["e0", "e2"]), (0, 1, ["e0"]), (-1, 0, ["e3"]), (3, 99, [])]
)
def test_steps_outside_are_left_out(tmp_path: Path, after: int, until: int, names: list[str]) -> None:
    assert read(written(tmp_path), after, until) == names


@pytest.mark.parametrize("other", OTHERS, ids=["environment", "template", "seed", "older version"])
def test_episodes_that_were_made_with_other_settings_are_left_out(tmp_path: Path, other: dict[bytes, bytes]) -> None:
    run = written(tmp_path, other)
    assert read(run) == [] != read(run, metadata=other)


def test_what_a_resume_does_again_stays_known_until_a_checkpoint_has_it(tmp_path: Path) -> None:
    run = written(tmp_path)
    assert KnownEpisodes.before_resume(run).read(GAME, pytest.fail) == {}
    for _ in range(2):  # the resume itself is killed before it has done a step
        discard_after(run, 1, pytest.fail, sets_aside=True)
        assert sorted(KnownEpisodes.before_resume(run).read(GAME, pytest.fail)) == ["e0", "e2"]
    assert read(run) == ["e0", "e3"]
    discard_after(run, 2, pytest.fail, sets_aside=True)
    assert [file.name for file in (tmp_path / REDONE).iterdir()] == ["step_000003-00000-of-00001.parquet"]
    discard_after(run, 3, pytest.fail, sets_aside=True)
    assert list((tmp_path / REDONE).iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path: Path, damage: str) -> None:
    run, told = written(tmp_path), list[str]()
    file = tmp_path / "completions" / "step_000002-00000-of-00001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:100] if damage == "cut" else content[:-6] + b"\x01\x02" + content[-4:])
    found = KnownEpisodes.of_steps(run, 0, 3).read(GAME, told.append)
    assert sorted(found) == ["e0"] and len(told) == 1
    assert told[0].startswith("step_000002-00000-of-00001.parquet is damaged, environments are asked again for it: ")


@pytest.mark.parametrize("text", ["[]", "{}", '{"turns": 1, "start": 2, "contexts": []}', "not JSON"])
def test_an_episode_that_is_none_is_named_before_it_is_played(tmp_path: Path, text: str) -> None:
    run, told = written(tmp_path), list[str]()
    file = tmp_path / "completions" / "step_000001-00000-of-00001.parquet"
    table = pq.read_table(file)
    broken = pa.array([text] * len(table), pa.string())
    pq.write_table(table.set_column(table.column_names.index("episode"), "episode", broken), file)
    assert sorted(KnownEpisodes.of_steps(run, 0, 3).read(GAME, told.append)) == ["e0", "e2"]
    assert len(told) == 1 and told[0].startswith(f"{file.name} is damaged, ")
