"""What the driver and the workers of a run leave for each other, through the real actor."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlx.runs import mailbox
from rlx.runs.mailbox import Box


@pytest.fixture(scope="module")
def actor(ray_cluster: None) -> Any:
    return mailbox.start_mailbox()


@pytest.fixture
def box(actor: Any) -> Iterator[Box]:
    box = Box.new(actor)
    yield box
    box.close()


@pytest.mark.slow
def test_events_come_in_order(box: Box) -> None:
    """Large ones take another way through Ray than small ones, and can be overtaken there."""
    sizes = [1_000_000 if number % 3 == 0 else 1 for number in range(100)]
    for number, size in enumerate(sizes):
        box.send((number, "x" * size))
    received: list[Any] = []
    while len(received) < len(sizes):
        received += box.receive(len(received), 30.0)
    assert [(number, len(text)) for number, text in received] == list(enumerate(sizes))


def test_events_of_each_thread_keep_their_order(box: Box) -> None:
    def send(name: int) -> None:
        for number in range(50):
            box.send((name, number))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    received: list[Any] = []
    while len(received) < 200:
        received += box.receive(len(received), 30.0)
    assert all([number for name, number in received if name == own] == list(range(50)) for own in range(4))


@ray.remote(num_cpus=0)
def tell(box: Box) -> None:
    for number in range(50):
        box.send(number)
    box.send("the last", wait=True)


def test_what_one_process_waited_for_is_before_what_another_sends_next(box: Box) -> None:
    ray.get(tell.remote(box))
    box.send("end")
    received: list[Any] = []
    while "end" not in received:
        received += box.receive(len(received), 30.0)
    assert received == [*range(50), "the last", "end"]


@pytest.mark.slow
def test_without_its_actor_nobody_waits(ray_cluster: None) -> None:
    box = Box.new(mailbox.start_mailbox())
    box.post("job", is_last=True)
    ray.kill(box.actor)
    box.send("lost", wait=True)
    box.close()


def test_events_come_again_until_they_were_seen(box: Box) -> None:
    for number in range(3):
        box.send({"number": number})
    while len(box.receive(0, 30.0)) < 3:
        pass
    assert box.receive(1, 1.0) == [{"number": 1}, {"number": 2}]  # the reader was interrupted after the first
    assert box.receive(3, 0.01) == []
    box.send("more")
    assert box.receive(3, 5.0) == ["more"]


def test_a_reader_that_waits_gets_an_event_at_once(box: Box) -> None:
    threading.Timer(0.5, lambda: box.send("late")).start()
    started = time.monotonic()
    assert box.receive(0, 30.0) == ["late"]
    assert time.monotonic() - started < 10


def test_each_worker_finds_the_same_job(box: Box) -> None:
    assert box.post({"steps": 3}, is_last=False) == 1
    assert box.next_job(0) == box.next_job(0) == 1  # the second is a worker that was restarted
    assert box.read_job(1) == {"steps": 3}
    box.end_job()
    assert box.post({"steps": 4}, is_last=True) == 2
    assert (box.next_job(1), box.next_job(0), box.read_job(1), box.read_job(2)) == (2, 2, None, {"steps": 4})
    box.end_job(is_last=True)
    assert box.next_job(2) is None and box.next_job(0) is None


def test_a_worker_waits_for_its_next_job(box: Box) -> None:
    waiting = box.actor.next_job.remote(box.name, 0)
    assert ray.wait([waiting], timeout=0.5)[0] == []
    box.post("job", is_last=True)
    assert ray.get(waiting, timeout=10) == 1


def test_a_job_that_was_stopped_is_not_the_next_one(box: Box) -> None:
    box.post("first", is_last=False)
    box.stop()
    assert box.is_stopped(1)
    box.end_job()
    box.post("second", is_last=False)
    assert not box.is_stopped(2)


def test_a_job_goes_on_after_a_step_once_it_is_released_or_stopped(box: Box) -> None:
    box.post("job", is_last=True)
    waiting = box.actor.await_release.remote(box.name, 1, 4)
    box.release(2)
    assert ray.wait([waiting], timeout=0.5)[0] == []
    box.release(4)
    ray.get(waiting, timeout=10)
    box.await_release(1, 3)  # an earlier step, of workers that were restarted
    waiting = box.actor.await_release.remote(box.name, 1, 6)
    box.stop()
    ray.get(waiting, timeout=10)


def test_a_closed_box_lets_everyone_go(actor: Any) -> None:
    box = Box.new(actor)
    waiting = actor.next_job.remote(box.name, 0)
    box.close()
    assert ray.get(waiting, timeout=10) is None
    box.send("nobody reads it")
    assert box.receive(0, 0.01) == [] and box.is_stopped(1) and box.next_job(0) is None


def test_boxes_do_not_mix(actor: Any, box: Box) -> None:
    other = Box.new(actor)
    other.send("theirs")
    box.send("mine")
    assert (box.receive(0, 5.0), other.receive(0, 5.0)) == (["mine"], ["theirs"])
    other.close()


def test_the_end_of_a_mailbox_starts_no_ray() -> None:
    """As where Ray is shut down before a Tuner that was never fitted is gone."""
    code = "import ray; from rlx.runs.mailbox import end_mailbox; end_mailbox(None); assert not ray.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
