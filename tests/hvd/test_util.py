"""The helpers of horovod.common.util."""

import os
from typing import Any

import pytest

from allstep.hvd import util


class Ops:
    Average, Sum = 0, 1


def test_env_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_TEST_OLD", "before")
    monkeypatch.delenv("HVD_TEST_NEW", raising=False)
    with util.env(HVD_TEST_OLD="inside", HVD_TEST_NEW="inside", HVD_TEST_NONE=None):
        assert (os.environ["HVD_TEST_OLD"], os.environ["HVD_TEST_NEW"]) == ("inside", "inside")
        assert "HVD_TEST_NONE" not in os.environ
    with pytest.raises(KeyError), util.env(HVD_TEST_OLD="inside"):
        raise KeyError
    assert os.environ["HVD_TEST_OLD"] == "before"
    assert "HVD_TEST_NEW" not in os.environ


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("2", True), ("0", False), ("-1", False), ("yes", False)]
)
def test_a_switch_is_on_above_zero(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("HVD_TEST_SWITCH", value)
    assert util.env_flag("HVD_TEST_SWITCH") is on
    assert util.env_flag("HVD_TEST_NO_SUCH") is False


@pytest.mark.parametrize(
    ("length", "parts", "lengths"),
    [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])],
)
def test_split_list(length: int, parts: int, lengths: list[int]) -> None:
    items = list(range(length))
    split = util.split_list(items, parts)
    assert [len(part) for part in split] == lengths
    assert [item for part in split for item in part] == items


def test_powers_of_two() -> None:
    assert [number for number in range(-1, 20) if util.num_rank_is_power_2(number)] == [
        1,
        2,
        4,
        8,
        16,
    ]


def test_is_iterable() -> None:
    assert util.is_iterable([]) and util.is_iterable(iter(())) and not util.is_iterable(3)


@pytest.mark.parametrize(
    "version", ["1.5.0", "1.5", "1.5.1", "1.10.0", "2.0.0a1", "2.13.0+cpu", "1.5.0.post1", "v2.0.0"]
)
def test_later_versions(version: str) -> None:
    assert util.is_version_greater_equal_than(version, "1.5.0")


@pytest.mark.parametrize("version", ["1.4.9", "0.28.1", "1.5.0rc1", "1.5.0.dev3", "1.4.0+cu121"])
def test_earlier_versions(version: str) -> None:
    assert not util.is_version_greater_equal_than(version, "1.5.0")


@pytest.mark.parametrize(
    ("version", "target", "message"),
    [("1.5.0", "1.5", "major.minor.patch"), (1, "1.5.0", "int"), ("new", "1.5.0", "number")],
)
def test_what_is_no_version(version: Any, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        util.is_version_greater_equal_than(version, target)


def test_front_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet", verbose=True)
    assert "mxnet" in capsys.readouterr().out
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError, match=r"horovod\.mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)


def test_average_or_op() -> None:
    """Average is 0, so nothing may ask whether an op is true."""
    choose = util.get_average_backwards_compatibility_fun(Ops)
    assert (choose(None, None), choose(0, None), choose(5, None)) == (0, 0, 5)
    with pytest.warns(DeprecationWarning, match="average"):
        assert choose(None, True) == 0
    with pytest.warns(DeprecationWarning, match="average"):
        assert choose(None, False) == 1
    for op in (0, 1):
        with pytest.raises(ValueError, match="supersedes average"):
            choose(op, False)
