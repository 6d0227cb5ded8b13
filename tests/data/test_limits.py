"""The limit of what a chat template takes: it ends what is too slow or too large, and leaves nothing behind."""

import resource
import signal
import threading
import time

import pytest

from rlx.data.limits import limited


def state() -> tuple[object, tuple[int, int], bool]:
    """What a limit changes in the process: the handler of the alarm, the memory, and whether an alarm is set."""
    is_set = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    return signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS), is_set


def test_what_takes_too_long_is_ended_and_all_is_as_before() -> None:
    before = state()
    with (
        pytest.raises(ValueError, match=r"^the template took longer than 0\.02 s$"),
        limited("the template", 0.02, 1 << 30),
    ):
        while True:
            time.sleep(0.001)
    assert state() == before


def test_what_takes_too_much_memory_is_ended_and_all_is_as_before() -> None:
    before = state()
    with (
        pytest.raises(ValueError, match=r"^the template took more than 256 MiB$"),
        limited("the template", 5.0, 256 << 20),
    ):
        bytearray(2 << 30)
    assert state() == before
    with limited("the template", 5.0, 256 << 20):
        assert len(bytearray(16 << 20)) == 16 << 20


def test_an_error_of_the_block_is_not_changed() -> None:
    before = state()
    with pytest.raises(LookupError, match="its own"), limited("the template", 5.0, 1 << 30):
        raise LookupError("its own")
    assert state() == before


def test_a_limit_within_the_limit_of_the_process_never_widens_it() -> None:
    own, hard = resource.getrlimit(resource.RLIMIT_AS)
    narrow = 1 << 40  # more than this process has, less than what is asked for
    resource.setrlimit(resource.RLIMIT_AS, (narrow, hard))
    try:
        with limited("the template", 5.0, 1 << 41):
            assert resource.getrlimit(resource.RLIMIT_AS)[0] == narrow
        with limited("the template", 5.0, 1 << 20):
            assert resource.getrlimit(resource.RLIMIT_AS)[0] < narrow
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == narrow
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (own, hard))


def test_another_thread_has_no_limit_because_signals_are_for_the_main_one() -> None:
    found: list[object] = []

    def within() -> None:
        with limited("the template", 0.001, 1 << 20):
            time.sleep(0.01)
            found.append(state())

    before = state()
    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert found == [before]


def test_an_alarm_that_was_set_before_goes_on_afterwards() -> None:
    rung: list[int] = []
    handler, outer = (
        signal.signal(signal.SIGALRM, lambda *_: rung.append(1)),
        signal.setitimer(signal.ITIMER_REAL, 50.0),
    )
    try:
        with limited("the template", 5.0, 1 << 30):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 5.0
        assert 5.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50.0
        signal.raise_signal(signal.SIGALRM)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *outer)
