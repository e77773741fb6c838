"""The names of the modes between synchronous and asynchronous training."""

import pytest

from allstep.errors import ConfigError
from allstep.parallel.sync_mode import NAMES, SyncMode, sync_mode


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("allreduce", SyncMode("allreduce")),
        (" Async ", SyncMode("async")),
        ("stale:2", SyncMode("stale", 2)),
        ("local:8:3", SyncMode("local", 8, 3)),
    ],
)
def test_a_text_names_a_mode(text: str, mode: SyncMode) -> None:
    assert sync_mode(text) == mode
    assert sync_mode(str(mode)) == mode


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("asynch", "did you mean 'async'"),
        ("stale", "expected stale:S"),
        ("stale:0", "use sync=server"),
        ("clock:0", "use sync=server"),
        ("local:0", "from 1 to 1000000"),
        ("local:8:2:1", "expected local:H"),
        ("diloco:8:2", "expected diloco:H"),
        ("lazy:-1", "'-1' is no whole number"),
        ("lazy:9999999", "from 1 to 1000000"),
        ("async:3", "takes no number"),
        ("", "unknown mode"),
    ],
)
def test_other_texts_are_errors_of_one_line(text: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        sync_mode(text)
    assert found in str(error.value)
    assert "\n" not in str(error.value)


def test_only_equal_steps_wait_at_every_step() -> None:
    equal = {name for name in NAMES if SyncMode(name, 2).has_equal_steps}
    assert equal == {"allreduce", "server", "local", "diloco"}
