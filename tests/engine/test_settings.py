"""The engine's variables."""

import pytest

from allstep.engine.settings import Settings, read_settings
from allstep.errors import ConfigError
from allstep.limits import read_limits

LIMITS = read_limits({})


def test_defaults() -> None:
    assert read_settings(LIMITS, 0, False, {}) == Settings(
        128 << 20, True, 60.0, 0.0, 1800.0, False, None
    )


def test_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    env = {
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "70",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_THREAD_AFFINITY": "4, 5",
    }
    assert read_settings(LIMITS, 1, False, env) == Settings(0, False, 60.0, 70.0, 1800.0, True, 5)
    assert capsys.readouterr().err == ""


def test_no_stall_check() -> None:
    assert read_settings(LIMITS, 0, True, {"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall == 0.0


def test_a_stop_before_the_first_report_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
    assert read_settings(LIMITS, 0, False, env).stall_stop == 0.0
    assert (
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=30 is ignored: it is less than the 60 s"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "env",
    [
        {"HOROVOD_FUSION_THRESHOLD": "64MB"},
        {"HOROVOD_FUSION_THRESHOLD": "-1"},
        {"HOROVOD_FUSION_THRESHOLD": "inf"},
        {"HOROVOD_FUSION_THRESHOLD": "1e400"},
        {"HOROVOD_THREAD_AFFINITY": "0"},
        {"HOROVOD_THREAD_AFFINITY": "0,x"},
    ],
)
def test_values_that_make_no_sense(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(env))}="):
        read_settings(LIMITS, 1, False, env)
