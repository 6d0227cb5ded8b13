"""A run whose completions are episodes, of which driver, engine and environments are killed at random moments: its
metrics are, to the last bit, those of a run in which nothing died.

RLX_KILLS sets how many processes are killed (20).
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from shared import KILLED_S, Script, assert_all_end
from test_exact import KILLS, Place, finish

from rlx.runs import run_folder
from rlx.samples import reader
from rlx.storage.addresses import open_storage
from rlx.types import Episode
from tests.chaos.bad_world import HEALTHY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Start = Callable[..., Script]

DRIVER = "driver"
VICTIMS = (DRIVER, "ray::VLLMEngine", "ray::EnvironmentHost")
SHORT = ["--environment.max-turns", "3", "--environment.turn-tokens", "8", "--rollout.max-tokens", "96"]
SHORT += ["--algorithm.advantage", "grpo"]
GAME = ["--environment.name", "guess_number", "--environment.params", "{largest: 15}", *SHORT]
BAD = ["--environment.name", "tests.chaos.bad_world:BadWorld", *SHORT, "--environment.timeout-s", "2"]
BAD += ["--environment.repeat", "1.0", "--train.steps", "4"]
AGENT = ["--environment.name", "tests.chaos.asker:Asker", *SHORT]


def ended(run: Script, seconds: float) -> bool:
    """Waits a while; whether the run has ended."""
    deadline = time.monotonic() + seconds
    while run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return run.process.poll() is not None


def killed(run: Script, victim: str) -> bool:
    """Kills a process of the run if there is one of that name."""
    if victim == DRIVER:
        run.kill()
        assert_all_end(run, KILLED_S)
        return True
    for process in run.processes(victim):
        try:
            process.kill()
            return True
        except psutil.NoSuchProcess:
            continue
    return False


@pytest.mark.parametrize(("episodes", "most"), [(GAME, KILLS), (AGENT, max(1, KILLS // 3))], ids=["game", "agent"])
def test_episodes_survive_kills_of_driver_engine_and_environments(
    episodes: list[str], most: int, tmp_path: Path, tiny_model: Path, script: Start
) -> None:
    place = Place(str(tmp_path), tmp_path, tiny_model)
    finish(script("ppo.py", *place.words("whole", 1), *episodes))
    expected, moments = place.history("whole"), random.Random(0)
    assert max(expected["episode/turns"].values()) > [1.0]
    kills, lives = Counter[str](), 0
    while kills.total() < most:
        name = f"killed-{lives}"
        lives += 1
        run = script("ppo.py", *place.words(name, 1), *episodes)
        while kills.total() < most and not ended(run, moments.uniform(5, 30)):
            victim = VICTIMS[kills.total() % len(VICTIMS)]
            kills[victim] += killed(run, victim)
            print(f"{kills.total()}/{most}: {victim} of {name}, at step {place.newest(name)} or later", flush=True)
            if victim == DRIVER:
                begun = run_folder.holds_run(open_storage(place.address) / "runs" / name)
                again = ["--storage", place.address, "--resume", name] if begun else place.words(name, 1) + episodes
                run = script("ppo.py", *again)
        finish(run)
        assert place.history(name) == expected, name
    assert set(kills) == set(VICTIMS[:most])
    assert_all_end(run, 10)


def played(place: Place, name: str) -> list[Episode]:
    """The episodes that a run has trained on, or left out because they failed."""
    run = open_storage(place.address) / "runs" / name
    kept = [each for step in reader.kept_steps(run) for each in reader.completions(reader.read(run, step))]
    return [each.played for each in kept if each.played]


def test_a_run_goes_on_whatever_its_environments_do(tmp_path: Path, tiny_model: Path, script: Start) -> None:
    place = Place(str(tmp_path), tmp_path, tiny_model)
    run = script("ppo.py", *place.words("bad", 1), *BAD)
    finish(run)
    history, printed = place.history("bad"), run.output.read_text()
    assert sorted(history["reward/mean"]) == [1, 2, 3, 4]
    shares = {
        kind: sum(each[0] for each in history[f"episode/{kind}_fraction"].values()) / 4
        for kind in ("failed", "hung", "raised", "died", "unrepeatable")
    }
    failed = shares.pop("failed")
    assert 0.4 < failed < 0.9 and sum(shares.values()) == pytest.approx(failed)  # four of six kinds
    assert all(shares[kind] > 0 for kind in ("hung", "raised", "unrepeatable")), shares
    healthy = [each for each in played(place, "bad") if each.start.text in HEALTHY]
    assert {each.start.text for each in healthy} == set(HEALTHY)
    assert [each for each in healthy if each.failure] == []
    for told in ("raised LookupError: no such thing", "took longer than 2 s", "answers the same actions differently"):
        assert printed.count(told) >= 1, told
    assert_all_end(run, 10)
