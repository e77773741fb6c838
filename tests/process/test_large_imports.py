"""Imports without garbage collection: the collector is left as it was, and omits what was made."""

import gc

import pytest

from allstep.process.large_imports import uncollected


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> object:
    """Leave the collector as the session has it: with the tests' modules out of its way."""
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_pauses_and_omits_what_was_made(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        made = [Cycle() for _ in range(1000)]
    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() >= before + len(made)
    # What is made later is collected as ever.
    later = Cycle()
    assert any(each is later for each in gc.get_objects())
    assert not any(each is made[0] for each in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError, match="no module"), uncollected():
        raise ImportError("no module")
    assert gc.isenabled()
