"""Calls in other threads: their results, their errors, and those that do not come back."""

import gc
import threading
import time
import weakref
from functools import partial

import pytest

from allstep.process.thread_call import Call, CallThread, CallTimeout, call_within


class Thing:
    """Something a call may hold."""


def test_result_and_error() -> None:
    assert call_within(lambda: 7, 5, "test") == 7
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 // 0, 5, "test")


def test_a_late_call_is_left_behind() -> None:
    stop = threading.Event()
    began = time.monotonic()
    with pytest.raises(CallTimeout, match=r"did not return within 0\.1 s"):
        call_within(stop.wait, 0.1, "late")
    assert time.monotonic() - began < 5
    stop.set()


def test_a_timeout_of_the_call_itself_is_not_ours() -> None:
    def act() -> None:
        raise TimeoutError("of the call")

    with pytest.raises(TimeoutError, match="of the call") as caught:
        call_within(act, 5, "test")
    assert not isinstance(caught.value, CallTimeout)


def test_one_thread_runs_calls_in_their_order() -> None:
    thread, order = CallThread("test"), list[int]()

    def note(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    calls = [thread.start(partial(note, number)) for number in range(20)]
    assert len({call.result(5) for call in calls}) == 1
    assert order == list(range(20))
    thread.end()


def test_waiting_does_not_take_the_result_away() -> None:
    call = Call(lambda: "done")
    assert not call.wait(0.01)
    call.run()
    assert call.wait(0)
    assert call.result() == call.result() == "done"


@pytest.mark.usefixtures("processes")
def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    thread, thing = CallThread("test"), Thing()
    gone = weakref.ref(thing)
    assert thread.start(lambda thing=thing: thing).result(5) is thing  # type: ignore[misc]
    del thing
    gc.collect()
    end = time.monotonic() + 5
    while gone() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert gone() is None
    thread.end()
