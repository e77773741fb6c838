"""numpy's removed names for MXNet: only missing ones, only when MXNet is imported."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.ranks import clean_environment

NAMES_FILE = Path(__file__).parents[2] / "src" / "allstep" / "mxnet" / "numpy_names.py"
# Loads the module by its path, as a sitecustomize does: without torch and without MXNet.
BY_PATH = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("numpy_names", {str(NAMES_FILE)!r})
numpy_names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(numpy_names)
"""


def python(
    code: str,
    *,
    path: Path | None = None,
    options: tuple[str, ...] = (),
    settings: dict[str, str] | None = None,
) -> str:
    """Run code in a new interpreter that must succeed; return its output."""
    env = clean_environment() | (settings or {})
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([os.fspath(path), os.fspath(NAMES_FILE.parents[2])])
    done = subprocess.run(
        [sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def names() -> ModuleType:
    """The module, loaded as `BY_PATH` does."""
    namespace: dict[str, ModuleType] = {}
    exec(BY_PATH, namespace)
    return namespace["numpy_names"]


def test_names_that_numpy_has_are_not_replaced(names: ModuleType) -> None:
    numpy = ModuleType("numpy")
    everything = dict.fromkeys(names.add_missing_names(_complete(numpy)), None)
    for name in everything:
        setattr(numpy, name, name)
    assert names.add_missing_names(numpy) == []
    assert all(getattr(numpy, name) == name for name in everything)


def test_each_name_has_the_value_of_numpy_1_23(names: ModuleType) -> None:
    numpy = _complete(ModuleType("numpy"))
    added = names.add_missing_names(numpy)
    assert len(added) == len(set(added)) == 29
    assert (numpy.PINF, numpy.NINF, numpy.Inf, numpy.Infinity, numpy.infty) == (
        math.inf,
        -math.inf,
        math.inf,
        math.inf,
        math.inf,
    )
    assert math.isnan(numpy.NAN) and math.isnan(numpy.NaN)
    assert math.copysign(1, numpy.NZERO) == -1 and math.copysign(1, numpy.PZERO) == 1
    assert (numpy.bool, numpy.float, numpy.int, numpy.object) == (bool, float, int, object)
    same = {"float_": "float64", "alltrue": "all", "sometrue": "any", "product": "prod"}
    same |= {"cumproduct": "cumprod", "round_": "round", "in1d": "isin", "trapz": "trapezoid"}
    assert {name: getattr(numpy, name) for name in same} == same
    assert numpy.compat.basestring is str
    for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate"):
        with pytest.raises(NotImplementedError, match=rf"use numpy_financial\.{name}"):
            getattr(numpy, name)(1)


def _complete(numpy: ModuleType) -> ModuleType:
    """Add the names that the replacements are made of; each is its own name."""
    for name in ("float64", "all", "any", "prod", "cumprod", "round", "isin", "trapezoid"):
        setattr(numpy, name, name)
    return numpy


@pytest.mark.usefixtures("processes")
def test_a_process_without_mxnet_keeps_its_numpy() -> None:
    """Finding MXNet, as `allstep doctor` does, is not importing it; neither is the torch front-end."""
    code = (
        BY_PATH
        + """
import numpy
before = dict(vars(numpy))
numpy_names.install()
numpy_names.install()
assert sum(type(each).__name__ == "_Finder" for each in sys.meta_path) == 1
assert importlib.util.find_spec("mxnet") is not None
import allstep.torch
assert "mxnet" not in sys.modules
print([name for name in numpy_names._REPLACEMENTS if name in vars(numpy) and name not in before])
"""
    )
    assert python(code).strip() == "[]"


@pytest.mark.usefixtures("peers", "processes")
def test_mxnet_is_imported_with_warnings_as_errors() -> None:
    code = (
        BY_PATH
        + """
numpy_names.install()
import mxnet, numpy
assert type(mxnet.__spec__.loader).__name__ == "SourceFileLoader" and mxnet.__loader__ is mxnet.__spec__.loader
assert numpy.alltrue([1, 1]) and numpy.msort([[2], [1]]).tolist() == [[1], [2]]
print(mxnet.np.pad(mxnet.np.ones((1,)), (1, 1)).asnumpy().tolist(), mxnet.nd.ones((2,)).asnumpy().tolist())
"""
    )
    assert python(code, options=("-W", "error")).strip() == "[0.0, 1.0, 0.0] [1.0, 1.0]"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import numpy; numpy.name_of_the_past", ["numpy.name_of_the_past", "numpy==1.23.5"]),
        ("from numpy import name_of_the_past", ["numpy.name_of_the_past", "numpy==1.23.5"]),
        (
            "raise RuntimeError('exception `np.gone` was removed in the NumPy 3.0 release')",
            ["numpy.gone", "numpy==1.23.5"],
        ),
        (
            "raise ModuleNotFoundError('No module', name='distutils')",
            ["distutils", "pip install setuptools"],
        ),
        (
            "raise ModuleNotFoundError('No module', name='requests')",
            ["requests", "pip install requests"],
        ),
    ],
    ids=["attribute", "import", "in the text", "distutils", "requests"],
)
def test_what_is_missing_is_named_with_a_remedy(
    tmp_path: Path, body: str, expected: list[str]
) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text(body)
    code = (
        BY_PATH
        + """
numpy_names.install()
try:
    import mxnet
except ImportError as error:
    print(error)
"""
    )
    text = python(code, path=tmp_path)
    assert all(part in text for part in expected), text


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("threads", ["", "7"])
def test_mxnet_finds_the_share_of_cores(tmp_path: Path, threads: str) -> None:
    """Under mpirun, before `hvd.init()`, and before torch, which shares MXNet's OpenMP library."""
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text(
        "import os, sys; print(os.environ.get('OMP_NUM_THREADS'), 'torch' in sys.modules); sys.exit()"
    )
    place = {"RANK": 0, "SIZE": 9999, "LOCAL_RANK": 0, "LOCAL_SIZE": 9999}
    by_mpirun = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
    expected = f"{threads or 1} False"
    found = {
        python(code, path=tmp_path, settings={**by_mpirun, "OMP_NUM_THREADS": threads})
        for code in (
            BY_PATH + "numpy_names.install()\nimport mxnet",
            "import allstep.mxnet",
        )
    }
    assert {text.strip() for text in found} == {expected}


@pytest.mark.usefixtures("processes")
def test_mxnet_that_is_not_installed() -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name == "mxnet":
            raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
sys.meta_path.insert(0, Missing())
try:
    import allstep.mxnet
except ModuleNotFoundError as error:
    print(error)
"""
    assert "pip install --no-deps mxnet==1.9.1" in python(code)
