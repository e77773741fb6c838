"""Fixtures for tests of the loader."""

import gc
from collections.abc import Iterator

import pytest

from support.loader_workers import children, fds, our_threads


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no thread, descriptor or process behind."""
    gc.collect()
    before = fds()
    yield
    gc.collect()
    assert our_threads() == []
    assert fds() == before
    assert children() == []
