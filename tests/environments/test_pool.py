"""Environments that raise, hang, die and lie: what the pool does, and what it counts. In this process, without Ray."""

import asyncio
import re
import threading
import time
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest
from actor_cases import Handle
from episode_cases import pool_of

from rlx.environments.host import Action, EnvironmentHost, HostLost, HostSettings, Reply
from rlx.environments.pool import ActorHost, EnvironmentPool, LocalHost
from rlx.types import EnvironmentFailed, TaskRow

ROW = TaskRow("question", "answer")
HERE = "test_pool:"


class Echo:
    """Says what it is told, with the seed of the turn."""

    def reset(self, row: TaskRow, seed: int) -> str:
        return f"{row.question} {seed}"

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        return f"{action} {seed}", 1.0, action == "end"


class Raising(Echo):
    made = 0

    def __init__(self) -> None:
        Raising.made += 1

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        if action == "raise" or (action == "once" and Raising.made < 2):
            raise LookupError("no such thing")
        return super().step(action, seed)


class Hanging(Echo):
    """Hangs in the first process alone."""

    hangs = 1

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        if action == "hang" and Hanging.hangs:
            Hanging.hangs -= 1
            time.sleep(1.0)
        return super().step(action, seed)


class Lying(Echo):
    """Never says the same twice."""

    count = 0

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        Lying.count += 1
        return f"{Lying.count}", 0.0, False


class Endless(Echo):
    async def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        await asyncio.Event().wait()
        raise AssertionError


class Wrong(Echo):
    """Returns what is no observation, or a reward that is no number."""

    def step(self, action: str, seed: int) -> Any:
        answers = {"reward": ("a", float("nan"), False), "tuple": "abc", "five": ("a", 0.0, False, False, {})}
        return answers.get(action, (5, 0.0, False))


class Fragile(Echo):
    """Fails at the second action in its first instance, and at the beginning in its second."""

    made = 0

    def __init__(self) -> None:
        Fragile.made += 1

    def reset(self, row: TaskRow, seed: int) -> str:
        if Fragile.made == 2:
            raise LookupError("not now")
        return super().reset(row, seed)

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        if action == "b" and Fragile.made == 1:
            raise LookupError("not yet")
        return super().step(action, seed)


class Moody(Echo):
    """Scores the same answer differently."""

    scored = 0

    def score(self, answer: str) -> float:
        Moody.scored += 1
        return float(Moody.scored)


class Field(Echo):
    """Answers with a field of that name."""

    def step(self, action: str, seed: int) -> Any:
        fields = {"when": date(2020, 1, 1), "half": np.float16(0.5), "most": float("inf"), "none": [float("nan")]}
        return [{"role": "user", "content": "a", action: fields[action]}], 0.0, False


class Named(Echo):
    """Has an argument that is called as one of ours."""

    def __init__(self, method: str) -> None:
        self.method = method

    def reset(self, row: TaskRow, seed: int) -> str:
        return self.method


class Leaving(Echo):
    """Takes its time to end."""

    async def close(self) -> None:
        await asyncio.sleep(0.1)


class Lingering(Echo):
    """Does not end."""

    def close(self) -> None:
        time.sleep(2.0)


class Lingers(Raising):
    """Those do not end that are made with an even number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = Raising.made

    def reset(self, row: TaskRow, seed: int) -> str:
        if row.question == "raise" and self.number % 2 == 0:
            raise LookupError
        return super().reset(row, seed)

    def close(self) -> None:
        time.sleep(1.0 if self.number % 2 == 0 else 0.0)


class Restarting(LocalHost):
    """A host whose process takes a while to start: until then its calls fail, as those of an actor do."""

    starts = False

    async def call(self, method: str, *args: Any) -> Any:
        if self.starts:
            raise HostLost("it is being started")
        return await super().call(method, *args)

    def replace(self) -> None:
        super().replace()
        self.starts = True

    async def is_up(self) -> bool:
        await asyncio.sleep(0.05)
        self.starts = False
        return True


class Closed(Echo):
    closed = 0

    def close(self) -> None:
        Closed.closed += 1


class Dying(LocalHost):
    """A host whose process dies at some calls of `step`."""

    def __init__(self, settings: HostSettings, at: set[int]) -> None:
        super().__init__(settings)
        self.at, self.steps, self.lives = at, 0, 1

    async def call(self, method: str, *args: Any) -> Any:
        self.steps += method == "step"
        if method == "step" and self.steps in self.at:
            self.at.discard(self.steps)
            raise HostLost("its process ended")
        return await super().call(method, *args)

    def replace(self) -> None:
        self.lives += 1
        super().replace()


class Filling(Echo):
    """Keeps something of each step, and there is memory for two."""

    kept = 0

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        return self.keep(action), 0.0, False

    def keep(self, what: str) -> str:
        """Keeps something.

        Args:
            what: is kept
        """
        Filling.kept += 1
        if Filling.kept > 2:
            raise MemoryError
        return what


class FillingTool:
    """The same as a tool."""

    keep = Filling.keep

    def score(self) -> float:
        return 1.0


class Emptied(LocalHost):
    """Has its memory again when it is replaced."""

    def replace(self) -> None:
        super().replace()
        Filling.kept = 0


def said(pool: EnvironmentPool, *actions: str, check: bool = False) -> tuple[list[str], bool]:
    """What an episode says, and whether it is repeatable."""

    async def played() -> tuple[list[str], bool]:
        texts = [(await pool.start("1", ROW, 7)).text]
        try:
            for number, action in enumerate(actions):
                texts.append((await pool.step("1", action, number)).text)
        except EnvironmentFailed as error:
            texts.append(f"failed: {error}")
        return texts, await pool.close("1", check)

    return asyncio.run(played())


def test_an_episode_is_given_its_row_and_its_seeds() -> None:
    assert said(pool_of(f"{HERE}Echo"), "a", "b", check=True) == (["question 7", "a 0", "b 1"], True)


def test_a_host_that_dies_is_replaced_and_the_episode_goes_on_where_it_was() -> None:
    host = Dying(HostSettings(f"{HERE}Echo", {}, 5.0, 2), {1, 3})
    pool = pool_of("", [host])
    assert said(pool, "a", "b", "c") == (["question 7", "a 0", "b 1", "c 2"], True)
    assert host.lives == 3 and pool.failures == {"died": 2}
    assert len(pool.told) == 1 and "its process ended" in pool.told[0]  # type: ignore[attr-defined]


def test_a_host_that_dies_at_every_attempt_fails_the_episode_alone() -> None:
    pool = pool_of("", [Dying(HostSettings(f"{HERE}Echo", {}, 5.0, 2), {2, 3})], retries=1)
    assert said(pool, "a", "b") == (["question 7", "a 0", "failed: its process ended"], True)
    assert said(pool, "a", "b") == (["question 7", "a 0", "b 1"], True)


def test_what_an_environment_raises_fails_its_episode_after_another_attempt() -> None:
    Raising.made = 0
    pool = pool_of(f"{HERE}Raising")
    assert said(pool, "once") == (["question 7", "once 0"], True)  # a fresh instance has answered
    assert pool.failures == {"raised": 1}
    *texts, failed = said(pool, "a", "raise")[0]
    assert texts == ["question 7", "a 0"]
    assert re.fullmatch(rf"failed: raised LookupError: no such thing at {re.escape(__file__)}:\d+", failed)
    assert pool.failures == {"raised": 3}


def test_a_call_that_hangs_has_its_process_replaced() -> None:
    Hanging.hangs = 1
    pool = pool_of(f"{HERE}Hanging", timeout_s=0.2)
    assert said(pool, "a", "hang", "b") == (["question 7", "a 0", "hang 1", "b 2"], True)
    assert pool.failures == {"hung": 1}
    Hanging.hangs = 2
    assert said(pool, "hang")[0][-1] == "failed: took longer than 0.2 s"


def retries(pool: EnvironmentPool, *actions: str) -> list[int]:
    """How many calls failed before each answer of an episode: its beginning, each action, and the score at the end."""

    async def played() -> list[int]:
        found = [await pool.start("1", ROW, 7)]
        try:
            found += [await pool.step("1", action, number) for number, action in enumerate(actions)]
            found.append(await pool.finish("1", actions[-1]))
        finally:
            await pool.close("1")
        return [each.retries for each in found]

    return asyncio.run(played())


def test_an_answer_has_the_number_of_calls_that_failed_before_it() -> None:
    Raising.made, Hanging.hangs = 0, 1
    assert retries(pool_of(f"{HERE}Raising"), "a", "once") == [0, 0, 1, 0]
    assert retries(pool_of(f"{HERE}Hanging", timeout_s=0.2), "hang", "b") == [0, 1, 0, 0]
    dying = Dying(HostSettings(f"{HERE}Echo", {}, 5.0, 2), {1, 2})
    assert retries(pool_of("", [dying], retries=2), "a", "b") == [0, 2, 0, 0]


def test_a_failure_has_its_kind() -> None:
    def kind(pool: EnvironmentPool, *actions: str) -> str:
        with pytest.raises(EnvironmentFailed) as caught:
            retries(pool, *actions)
        return caught.value.kind

    Hanging.hangs = 1
    settings = HostSettings(f"{HERE}Echo", {}, 5.0, 2)
    assert kind(pool_of(f"{HERE}Hanging", timeout_s=0.2, retries=0), "hang") == "hung"
    assert kind(pool_of(f"{HERE}Raising"), "raise") == "raised"
    assert kind(pool_of(f"{HERE}Wrong"), "text") == "raised"
    assert kind(pool_of("", [Dying(settings, {1, 2})]), "a") == "died"
    assert kind(pool_of("", [Dying(replace(settings, name=f"{HERE}Lying"), {2})]), "a", "b") == "unrepeatable"


@pytest.mark.parametrize(
    ("kind", "action"), [("Filling", "a"), ("FillingTool", '{"name": "keep", "arguments": {"what": "a"}}')]
)
def test_a_process_without_memory_is_replaced(kind: str, action: str) -> None:
    Filling.kept = 0
    pool = pool_of("", [Emptied(HostSettings(f"{HERE}{kind}", {}, 5.0, 4))])
    assert [said(pool, action)[0][-1] for _ in range(5)] == ["a"] * 5
    assert pool.failures == {"raised": 2}


def test_an_async_call_that_hangs_is_ended_and_its_process_stays() -> None:
    pool = pool_of(f"{HERE}Endless", timeout_s=0.1, retries=0)
    (host,) = pool.hosts
    assert isinstance(host, LocalHost)
    replaced: list[bool] = []
    host.replace = lambda: replaced.append(True)  # type: ignore[method-assign]
    assert said(pool, "a")[0][-1] == "failed: took longer than 0.1 s"
    assert pool.failures == {"hung": 1} and not replaced


def test_an_environment_that_answers_differently_is_caught_when_it_is_repeated() -> None:
    pool = pool_of(f"{HERE}Lying")
    texts, is_repeatable = said(pool, "a", check=True)
    assert len(texts) == 2 and not is_repeatable
    assert pool.failures == {"unrepeatable": 1}
    host = Dying(HostSettings(f"{HERE}Lying", {}, 5.0, 2), {2})
    assert said(pool_of("", [host]), "a", "b")[0][-1] == (
        "failed: it answers differently when its actions are repeated"
    )


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("text", "TypeError: an observation is text or messages, not int"),
        ("reward", "ValueError: the reward nan of step is not a finite number"),
        ("tuple", "TypeError: step returns (observation, reward, whether the episode has ended), not str"),
        ("five", "has ended), not 5 values; Gymnasium's terminated and truncated are one here, and there is no info"),
    ],
)
def test_what_is_no_observation_fails_the_episode(action: str, reason: str) -> None:
    failed = said(pool_of(f"{HERE}Wrong"), action)[0][-1]
    assert reason in failed and ".py" not in failed  # it is no line of the environment that raises


def test_episodes_are_closed_once_each() -> None:
    Closed.closed = 0
    said(pool_of(f"{HERE}Closed"), "a")
    assert Closed.closed == 1


def test_ends_that_hang_fail_no_episode_and_have_their_process_replaced_once_they_are_many() -> None:
    host = Dying(HostSettings(f"{HERE}Lingering", {}, 0.1, 2), set())
    pool = pool_of("", [host], retries=0)
    assert [said(pool, "a")[0] for _ in range(5)] == [["question 7", "a 0"]] * 5
    assert host.lives == 3 and pool.failures == {"hung": 5}
    assert "close took longer than 0.1 s" in pool.told[0]  # type: ignore[attr-defined]


def test_ends_of_second_instances_that_hang_have_their_process_replaced_too() -> None:
    host, Raising.made = Dying(HostSettings(f"{HERE}Lingers", {}, 0.1, 2), set()), 0
    pool = pool_of("", [host], retries=0)
    assert [had_twice(pool, "a") for _ in range(4)] == [True] * 4
    assert host.lives == 3 and pool.failures == {"hung": 4}


@pytest.mark.parametrize("concurrency", [1, 2])
def test_ends_of_failed_instances_that_hang_are_told_and_are_no_attempt(concurrency: int) -> None:
    host, Raising.made = Dying(HostSettings(f"{HERE}Lingers", {}, 0.1, concurrency), set()), 1
    pool = pool_of("", [host], retries=1)

    async def played() -> list[str]:
        texts = [(await pool.start("1", ROW, 7)).text]
        with pytest.raises(EnvironmentFailed, match="no such thing"):  # in the first instance, and in the next one
            await pool.step("1", "raise", 0)
        return [*texts, str(await pool.close("1"))]

    assert asyncio.run(played()) == ["question 7", "True"]
    assert pool.failures == {"raised": 2, "hung": 1} and host.lives == (2 if concurrency == 1 else 1)


def test_ends_that_hang_of_what_has_not_begun_and_of_a_process_before_are_told() -> None:
    host, Raising.made = LocalHost(HostSettings(f"{HERE}Lingers", {}, 0.1, 4)), 1
    before, after = (pool_of("", [host], retries=1) for _ in range(2))

    async def played() -> str:
        said = (await before.start("1", TaskRow("raise", ""), 7)).text  # in the second instance
        await before.start("2", ROW, 7)
        await after.forget()
        return said

    assert asyncio.run(played()) == "raise 7"
    assert before.failures == {"raised": 1, "hung": 1} and after.failures == {"hung": 1}


def test_a_call_that_hung_is_made_again_once_its_host_is_up() -> None:
    Hanging.hangs = 1
    host = Restarting(HostSettings(f"{HERE}Hanging", {}, 0.1, 4))
    pool = EnvironmentPool([host], "owner/", retries=1, concurrency=4, notify=lambda text: None)
    assert said(pool, "a", "hang") == (["question 7", "a 0", "hang 1"], True)


@pytest.mark.parametrize("last", ["step", "finish", "close"])
def test_an_episode_goes_on_where_another_rank_has_had_the_host_replaced(last: str) -> None:
    host = LocalHost(HostSettings(f"{HERE}Echo", {}, 5.0, 4))
    pool = pool_of("", [host], retries=0)

    async def played() -> bool:
        await pool.start("1", ROW, 7, check=True)
        await pool.step("1", "a", 0)
        host.replace()
        if last == "step":
            assert (await pool.step("1", "b", 1)).text == "b 1"
        if last == "finish":
            assert (await pool.finish("1", "b")).done
        return await pool.close("1", check=True)

    assert asyncio.run(played()) and not pool.failures


def test_episodes_that_wait_for_room_are_unharmed_when_their_host_is_replaced() -> None:
    Hanging.hangs = 1
    host = LocalHost(HostSettings(f"{HERE}Hanging", {}, 0.1, 1))
    pool = EnvironmentPool([host], "owner/", retries=1, concurrency=1, notify=lambda text: None)

    async def played() -> list[str]:
        for key in "abc":
            await pool.start(key, ROW, 7)
        return [
            each.text for each in await asyncio.gather(*(pool.step(k, k if k != "a" else "hang", 0) for k in "abc"))
        ]

    assert asyncio.run(played()) == ["hang 0", "b 0", "c 0"]
    assert dict(pool.failures) == {"hung": 1}


class Crowded(LocalHost):
    """A host whose process one episode hangs and another one loses with its call, so often."""

    def __init__(self, settings: HostSettings, hangs: int) -> None:
        super().__init__(settings)
        self.hangs, self.is_waited_for, self.lost = hangs, asyncio.Event(), asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        if method != "step" or not self.hangs:
            return await super().call(method, *args)
        if args[1].text == "hang":
            await self.is_waited_for.wait()
            return Reply(failure="took too long", is_late=True, is_stuck=True)
        lost = self.lost
        self.is_waited_for.set()
        await lost.wait()
        raise HostLost("its process ended")

    def replace(self) -> None:
        super().replace()
        self.lost.set()
        self.hangs, self.is_waited_for, self.lost = self.hangs - 1, asyncio.Event(), asyncio.Event()


def test_an_episode_that_hangs_costs_the_others_of_its_process_no_attempt() -> None:
    pool = pool_of("", [Crowded(HostSettings(f"{HERE}Echo", {}, 5.0, 4), 2)], retries=1)

    async def played() -> list[Any]:
        for key in "ab":
            await pool.start(key, ROW, 7)
        return await asyncio.gather(pool.step("a", "hang", 0), pool.step("b", "b", 0), return_exceptions=True)

    hanging, good = asyncio.run(played())
    assert isinstance(hanging, EnvironmentFailed) and good.text == "b 0"
    assert pool.failures == {"hung": 2}


def test_a_call_waits_for_a_process_that_another_episode_has_had_replaced() -> None:
    host = Restarting(HostSettings(f"{HERE}Echo", {}, 5.0, 4))
    pool = pool_of("", [host], retries=0)

    async def played() -> str:
        await pool.start("1", ROW, 7)
        host.replace()
        return (await pool.step("1", "a", 0)).text

    assert asyncio.run(played()) == "a 0" and not pool.failures


def test_a_repetition_that_fails_is_an_attempt_like_any_other() -> None:
    Fragile.made = 0
    assert said(pool_of(f"{HERE}Fragile", retries=2), "a", "b") == (["question 7", "a 0", "b 1"], True)


def test_a_score_that_is_another_one_when_it_is_given_again_is_caught() -> None:
    pool = pool_of(f"{HERE}Moody")

    async def cut() -> bool:
        await pool.start("1", ROW, 7)
        await pool.step("1", "a", 0)
        await pool.finish("1", "a")
        return await pool.close("1", check=True)

    assert asyncio.run(cut()) is False and pool.failures["unrepeatable"] == 1


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("when", "date datetime.date(2020, 1, 1)"),
        ("half", "float16 np.float16(0.5)"),
        ("most", "float inf"),
        ("none", "list [nan]"),
    ],
)
def test_a_field_that_no_checkpoint_can_keep_fails_the_episode(field: str, kind: str) -> None:
    texts, _ = said(pool_of(f"{HERE}Field"), field)
    assert (
        texts[1]
        == f"failed: raised TypeError: the field {field} of a message is not JSON but {kind}, in what step has returned"
    )


class Unsendable(EnvironmentHost):
    """Answers a turn, its repetition and the end of all with what cannot travel."""

    asked = 0

    async def step(self, key: str, action: Action) -> Any:
        self.asked += 1
        return threading.Lock()

    async def repeat(self, *args: Any) -> Any:
        return threading.Lock()

    async def forget(self, owner: str) -> Any:
        return threading.Lock()


def test_an_answer_that_cannot_travel_fails_its_episode_at_once() -> None:
    host = Unsendable(HostSettings(f"{HERE}Echo", {}, 5.0, 4))
    pool = pool_of("", [ActorHost(Handle(host), 5.0)], retries=3)

    async def played() -> tuple[str, bool]:
        await pool.start("1", ROW, 7)
        with pytest.raises(EnvironmentFailed) as failed:
            await pool.step("1", "a", 0)
        same = await pool.close("1", check=True)
        await pool.forget()
        return str(failed.value), same

    assert asyncio.run(played()) == ("raised TypeError: cannot pickle '_thread.lock' object", True)
    assert host.asked == 1 and pool.failures == {"raised": 3}


def test_an_argument_may_be_called_method() -> None:
    host = LocalHost(HostSettings(f"{HERE}Named", {"method": "post"}, 5.0, 4))
    pool = EnvironmentPool([host], "owner/", retries=0, concurrency=4, notify=lambda text: None)
    assert said(pool, "a")[0] == ["post", "a 0"]


def test_what_an_earlier_process_left_is_ended_and_nothing_of_the_new_one() -> None:
    pool = pool_of(f"{HERE}Leaving")

    async def played() -> list[str]:
        await pool.start("1", ROW, 7)
        forgetting = asyncio.ensure_future(pool.forget())
        await asyncio.sleep(0.02)
        await pool.start("1", ROW, 8)
        await forgetting
        return [(await pool.step("1", "a", 0)).text]

    assert asyncio.run(played()) == ["a 0"]


class SlowToForget(LocalHost):
    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0.05 if method == "forget" else 0.0)
        return await super().call(method, *args)


def test_episodes_that_begin_while_a_host_is_slow_to_forget_are_not_ended() -> None:
    settings = HostSettings(f"{HERE}Echo", {}, 5.0, 4)
    hosts = [SlowToForget(settings), LocalHost(settings)]
    pool = EnvironmentPool(hosts, "owner/", retries=0, concurrency=4, notify=lambda text: None)

    async def played() -> list[str]:
        forgetting = asyncio.ensure_future(pool.forget())
        await asyncio.sleep(0.01)
        await pool.start("1", ROW, 7)  # on the first host, which has not begun to forget
        await pool.start("2", ROW, 7)
        await forgetting
        return [(await pool.step("2", "a", 0)).text]

    assert asyncio.run(played()) == ["a 0"]


class DiesInClose(LocalHost):
    async def call(self, method: str, *args: Any) -> Any:
        if method == "close":
            raise HostLost("died")
        return await super().call(method, *args)


def test_a_host_that_is_lost_in_a_last_call_is_replaced() -> None:
    host = DiesInClose(HostSettings(f"{HERE}Echo", {}, 5.0, 4))
    pool = EnvironmentPool([host], "owner/", retries=1, concurrency=4, notify=lambda text: None)

    async def played() -> str:
        await pool.start("1", ROW, 7)
        await pool.start("2", ROW, 7)
        assert await pool.close("1")
        assert dict(pool.failures) == {"died": 1}
        return (await pool.step("2", "a", 0)).text  # on a new instance, which is told all from the beginning

    assert asyncio.run(played()) == "a 0"
    assert dict(pool.failures) == {"died": 1}


def had_twice(pool: EnvironmentPool, *actions: str) -> bool:
    """Whether an episode comes out the same that is had once more beside itself."""

    async def played() -> bool:
        await pool.start("1", ROW, 7, check=True)
        for number, action in enumerate(actions):
            await pool.step("1", action, number)
        return await pool.close("1", check=True)

    return asyncio.run(played())


class Recording(LocalHost):
    """Notes the calls, and begins a new life before the call with this number."""

    def __init__(self, settings: HostSettings, dies_at: int = -1) -> None:
        super().__init__(settings)
        self.dies_at, self.calls = dies_at, list[str]()

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(f"{method} {args[0].rpartition('/0/')[2]}")
        if len(self.calls) == self.dies_at:
            self.replace()
            raise HostLost("its process ended")
        return await super().call(method, *args)


def test_an_episode_that_is_had_once_more_beside_itself_is_told_all_twice_and_not_repeated_at_the_end() -> None:
    host = Recording(HostSettings(f"{HERE}Echo", {}, 5.0, 2))
    assert had_twice(pool_of("", [host]), "a", "b")
    assert sorted(host.calls) == sorted(
        [f"{call} {key}" for key in ("1", "1/second") for call in ("start", "step", "step", "close")]
    )


def test_a_second_instance_that_answers_differently_is_counted() -> None:
    pool = pool_of(f"{HERE}Lying")
    assert not had_twice(pool, "a", "b") and pool.failures == {"unrepeatable": 1}


def test_a_second_instance_that_fails_is_no_proof() -> None:
    Raising.made = 0
    pool = pool_of(f"{HERE}Raising", retries=0)

    async def played() -> bool:
        await pool.start("1", ROW, 7, check=True)
        Raising.made = 2
        await pool.step("1", "once", 0)
        Raising.made = 0
        return await pool.close("1", check=True)

    assert asyncio.run(played()) and pool.failures == {"raised": 1}


@pytest.mark.parametrize("dies_at", [2, 3, 4, 5, 6])
def test_an_episode_whose_second_instance_is_lost_is_repeated_at_the_end(dies_at: int) -> None:
    host = Recording(HostSettings(f"{HERE}Echo", {}, 5.0, 2), dies_at)
    pool = pool_of("", [host])
    assert had_twice(pool, "a", "b")
    assert set(pool.failures) <= {"died"}
