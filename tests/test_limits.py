"""The time limits and their aliases."""

import pytest

from allstep.errors import ConfigError
from allstep.limits import read_limits


def test_defaults_and_aliases() -> None:
    assert read_limits({}) == (30, 10, 60, 1800)
    assert read_limits({"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}).timeout == 5
    assert read_limits({"HOROVOD_START_TIMEOUT": "5", "ALLSTEP_START_TIMEOUT": "7.5"}).start == 7.5


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "inf", "1e999", "31536001"])
def test_a_limit_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match=r"ALLSTEP_LOST_SECONDS=.* above 0 and at most 31536000"):
        read_limits({"ALLSTEP_LOST_SECONDS": value})


def test_a_year_serves_for_never() -> None:
    assert read_limits({"ALLSTEP_TIMEOUT": "31536000"}).timeout == 31_536_000
