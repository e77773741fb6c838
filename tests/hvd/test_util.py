"""The helpers of horovod.common.util."""

import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from allstep.hvd import frameworks, util
from support.ranks import clean_environment


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


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and TensorFlow's CPU build are installed, nothing else."""
    found = {"torch": "2.13.0", "tensorflow-cpu": "2.21.0"}

    def version(package: str) -> str:
        if package not in found:
            raise metadata.PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(frameworks, "is_importable", lambda module: False)


@pytest.mark.usefixtures("installed")
def test_front_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.extension_available("torch")
    assert util.extension_available("tensorflow", verbose=True)
    assert capsys.readouterr().out == "tensorflow: available, TensorFlow 2.21.0\n"
    assert not util.extension_available("mxnet", verbose=True)
    assert "pip install --no-deps mxnet==1.9.1" in capsys.readouterr().out
    assert not util.extension_available("caffe", verbose=True)
    assert "only for torch, tensorflow, keras, mxnet" in capsys.readouterr().out
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    for name in ("mxnet", "caffe"):
        with pytest.raises(ImportError, match=rf"horovod\.{name}"):
            util.check_extension(f"horovod.{name}", "HOROVOD_WITH_IT", __file__)


@pytest.mark.usefixtures("installed")
def test_what_is_built_is_reported_for_each_front_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.gloo_built() and not util.mpi_built()
    assert capsys.readouterr().out == ""
    assert util.gloo_built(verbose=True) and not util.mpi_built(verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "Extension torch was built with Gloo.",
        "Extension tensorflow was built with Gloo.",
        "Extension torch was NOT built with MPI.",
        "Extension tensorflow was NOT built with MPI.",
    ]


@pytest.mark.usefixtures("installed")
def test_versions_of_the_frameworks() -> None:
    assert frameworks.versions() == {
        "PyTorch": "2.13.0",
        "TensorFlow": "2.21.0",
        "Keras": None,
        "tf-keras": None,
        "JAX": None,
        "MXNet": None,
    }


def test_frameworks_are_found_without_an_import() -> None:
    """A module that is there without its package's metadata counts, at an unknown version."""
    assert frameworks.is_importable("this") and "this" not in sys.modules
    assert not frameworks.is_importable("no_such_framework")
    known = frameworks.Framework("Zen", "this", ("no-such-package",), "zen")
    assert known.version == "of unknown version"
    missing = frameworks.Framework("None", "no_such_framework", ("no-such-package",), "none")
    assert missing.version is None
    with pytest.raises(ImportError, match="x needs None, which is not installed: pip install none"):
        frameworks.require("x", known, missing)


IMPORT = """
import importlib, sys
front_end, *missing = sys.argv[1:]
for name in missing:
    sys.modules[name] = None
try:
    hvd = importlib.import_module(front_end)
    hvd.init()
    import keras
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
except Exception as error:
    print(error)
"""


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    ("backend", "names", "expected"),
    [
        ("", ["allstep.tensorflow", "tensorflow"], "TensorFlow, which is not installed: pip"),
        ("torch", ["allstep.keras", "keras"], "Keras, which is not installed: pip install keras"),
        ("tensorflow", ["allstep.keras", "tensorflow"], "TensorFlow, which is not installed: pip"),
        (
            "jaxx",
            ["allstep.keras"],
            "no backend 'jaxx': set KERAS_BACKEND (or \"backend\" in ~/.ker",
        ),
        ("numpy", ["allstep.keras"], "the Keras backend 'numpy' cannot train: set KERAS_BACKEND"),
    ],
)
def test_a_missing_framework_or_another_backend(
    backend: str, names: list[str], expected: str
) -> None:
    """A front-end names what to install or to set, also without Horovod's name."""
    env = clean_environment() | {"KERAS_BACKEND": backend}
    command = [sys.executable, "-c", IMPORT, *names]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert expected in ended.stdout.splitlines()[-1], ended.stdout + ended.stderr


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
