"""The folder that answers `import horovod`: the same objects under Horovod's names, and nothing
else touched."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from allstep.launch.horovod import FOLDER, with_horovod
from support.allstep_command import run
from support.ranks import clean_environment

pytestmark = pytest.mark.usefixtures("processes")


def python(code: str, **env: str) -> str:
    """What a program prints that no launcher started, with the folder first on its path."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command,
        env=with_horovod({**clean_environment(), **env}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_verb_prints_the_folder() -> None:
    assert run("horovod-path").out == f"{FOLDER}\n"
    assert (FOLDER / "horovod" / "torch").is_dir()


def test_names_are_the_same_objects() -> None:
    code = """
        import importlib, sys
        import horovod, horovod.torch as hvd, allstep, allstep.torch
        assert horovod.__version__ == "0.28.1"
        assert horovod.run is horovod.runner.run is allstep.run
        for name in allstep.torch.__all__:
            assert getattr(hvd, name) is getattr(allstep.torch, name), name
        torch_names = "mpi_ops elastic.state functions optimizer compression sync_batch_norm"
        common_names = "basics elastic exceptions process_sets util"
        homes = {f"horovod.torch.{n}": f"allstep.torch.{n}" for n in torch_names.split()}
        homes |= {f"horovod.common.{n}": f"allstep.hvd.{n}" for n in common_names.split()}
        for name, home in homes.items():
            assert importlib.import_module(name) is importlib.import_module(home), name
        import horovod.torch.elastic
        assert horovod.torch.elastic.run is allstep.torch.elastic.run
        from horovod.torch.mpi_ops import _basics, is_homogeneous
        from horovod.torch.elastic.sampler import ElasticSampler
        assert ElasticSampler is hvd.elastic.ElasticSampler
        from horovod.common.exceptions import HorovodInternalError
        assert HorovodInternalError is hvd.HorovodInternalError
        from horovod.runner.elastic.worker import HostUpdateResult
        from horovod.runner.common.util.env import get_env_rank_and_size
        print(get_env_rank_and_size(), HostUpdateResult.mixed.value)
    """
    assert python(code, RANK="1", WORLD_SIZE="3") == "(1, 3) 3\n"


@pytest.mark.parametrize("name", ["spark", "ray"])
def test_what_is_not_there_is_reported(name: str) -> None:
    code = f"""
        try:
            import horovod.{name}
        except ImportError as error:
            print(error)
    """
    printed = python(code)
    assert printed.startswith("allstep does not ")
    assert "horovod.torch" in printed


def test_a_missing_framework_is_named() -> None:
    """Neither the framework nor torch is imported before."""
    code = """
        import importlib, os, sys
        missing = {"tensorflow": "tensorflow", "keras": "keras", "mxnet": "mxnet"}
        for name, package in missing.items():
            sys.modules[package] = None
            try:
                importlib.import_module(f"horovod.{name}")
            except ImportError as error:
                print(error.name, error)
        assert not {"torch", "numpy"} & sys.modules.keys()
        from horovod import _front_end
        del sys.modules["keras"]
        for legacy in ("0", "1"):
            os.environ["TF_USE_LEGACY_KERAS"] = legacy
            print(_front_end.framework_of_tensorflows_keras().install)
    """
    assert python(code).splitlines() == [
        "tensorflow horovod.tensorflow needs TensorFlow, which is not installed: pip install"
        " tensorflow",
        "keras horovod.keras needs Keras, which is not installed: pip install keras",
        "mxnet horovod.mxnet needs MXNet, which is not installed: pip install --no-deps"
        " mxnet==1.9.1 requests",
        "keras",
        "tf-keras",
    ]


NAMES = """
    import importlib, warnings
    warnings.simplefilter("ignore")
    modules = {
        "tensorflow": "functions compression elastic gradient_aggregation sync_batch_norm",
        "tensorflow.keras": "callbacks elastic",
        "keras": "callbacks elastic",
        "mxnet": "mpi_ops functions compression",
    }
    import mxnet, keras, tensorflow, horovod.torch
    for name, parts in modules.items():
        hvd = importlib.import_module(f"horovod.{name}")
        ours = importlib.import_module(f"allstep.{name}")
        for each in ours.__all__:
            assert getattr(hvd, each) is getattr(ours, each), (name, each)
        for part in parts.split():
            found = importlib.import_module(f"horovod.{name}.{part}")
            assert found is importlib.import_module(f"{ours.__name__}.{part}"), (name, part)
        assert hvd.shutdown is horovod.torch.shutdown, "one engine"
    hvd.init()
    print(hvd.rank(), hvd.size())
"""


@pytest.mark.usefixtures("peers")
def test_names_of_the_other_frameworks() -> None:
    """A script imports the framework first; one process can hold all of them."""
    assert python(NAMES, TF_CPP_MIN_LOG_LEVEL="3") == "0 1\n"


def test_a_real_horovod_is_left_alone(tmp_path: Path) -> None:
    """It is found without the flag, shadowed with it, and also when another PYTHONPATH
    names it."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'the real one'\n")
    command = ["-np", "1", sys.executable, "-c", "import horovod; print(horovod.__version__)"]
    env = {"PYTHONPATH": str(tmp_path)}
    assert run("run", *command, env=env).out == "[0] the real one\n"
    assert run("run", "--as-horovod", *command, env=env).out == "[0] 0.28.1\n"
    assert [path.name for path in (tmp_path / "horovod").iterdir() if path.suffix] == [
        "__init__.py"
    ]


LOADERS = """
import threading
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader

class Numbers(BaseDataLoader):
    def __init__(self, count, fail_at=None):
        self.count, self.fail_at = count, fail_at
        self.started = 0
    def __len__(self):
        return self.count
    def _iterate(self):
        self.started += 1
        for number in range(self.count):
            if number == self.fail_at:
                raise KeyError(number)
            yield number
    def _process_batch(self, batch):
        return batch, threading.current_thread() is threading.main_thread()

class Ahead(AsyncDataLoaderMixin, Numbers):
    pass
"""


def test_loaders_with_and_without_a_thread() -> None:
    code = """
        for loader in (Numbers(3), Ahead(0, count=3), Ahead(1, count=3), Ahead(count=3)):
            for epoch in range(3):
                assert list(loader) == [(0, True), (1, True), (2, True)], loader
            assert len(loader) == 3
        loader.close_async_loader()
        assert loader.thread is None and loader.started > 3  # 64 batches ahead are many epochs
        assert list(loader) == [(0, True), (1, True), (2, True)]
        loader.close_async_loader()
        loader.close_async_loader()
        failing = Ahead(2, count=5, fail_at=3)
        for _ in range(2):
            found = []
            try:
                for batch, _ in failing:
                    found.append(batch)
            except KeyError as error:
                found.append(error.args[0])
            assert found == [0, 1, 2, 3], found
        print(threading.active_count())
    """
    began = time.monotonic()
    assert (
        python(LOADERS + textwrap.dedent(code)) == "2\n"
    )  # the one loader of size 1 that was never closed
    assert time.monotonic() - began < 80
