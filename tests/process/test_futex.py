"""Sleep on a number in shared memory: ends by a change, by a wake-up of its kind, and by time."""

import mmap
import threading
import time

import pytest

from allstep.process import futex
from allstep.process.futex import address_of, new_fence, sleep_until_changed, wake

LONG = 20.0
"""Seconds that no test waits for, when all is well."""


@pytest.fixture
def number() -> memoryview:
    return memoryview(mmap.mmap(-1, 4096)).cast("q")


def sleeper(
    number: memoryview, seconds: float, bits: int = futex.ALL_BITS
) -> tuple[threading.Thread, list[float]]:
    """A thread that sleeps while the number is 0, and how long it did."""
    slept: list[float] = []

    def sleep() -> None:
        began = time.monotonic()
        sleep_until_changed(address_of(number), 0, seconds, bits)
        slept.append(time.monotonic() - began)

    thread = threading.Thread(target=sleep)
    thread.start()
    return thread, slept


def test_another_number_is_no_reason_to_sleep(number: memoryview) -> None:
    number[0] = 1
    began = time.monotonic()
    sleep_until_changed(address_of(number), 0, LONG)
    assert time.monotonic() - began < 5


def test_sleep_ends_with_its_time(number: memoryview) -> None:
    began = time.monotonic()
    sleep_until_changed(address_of(number), 0, 0.05)
    assert 0.04 < time.monotonic() - began < 5


def test_a_wake_up_after_a_change(number: memoryview) -> None:
    thread, slept = sleeper(number, LONG)
    number[0] = 1
    while thread.is_alive():  # it may not have fallen asleep yet: then the change keeps it awake
        wake(address_of(number), 1)
        thread.join(0.01)
    assert slept[0] < 5


def test_only_sleepers_of_the_kind_are_woken(number: memoryview) -> None:
    first, _ = sleeper(number, 1.0, bits=1)
    second, slept = sleeper(number, LONG, bits=2)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        wake(address_of(number), 8, bits=4)
    assert first.is_alive()
    assert second.is_alive()
    while second.is_alive():
        wake(address_of(number), 8, bits=2)
        second.join(0.01)
    assert slept[0] < 5
    first.join()


@pytest.mark.usefixtures("processes")
def test_an_unknown_processor_naps(number: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_SYSCALL", None)
    began = time.monotonic()
    sleep_until_changed(address_of(number), 0, LONG)
    wake(address_of(number), 1)
    assert time.monotonic() - began < 5


def test_a_fence_can_be_passed_again_and_again() -> None:
    fence = new_fence()
    for _ in range(1000):
        fence()
