"""Fixtures that every test may use."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from support.costs import Costs
from support.hosts import three_hosts, two_hosts
from support.ranks import rank_server, ranks
from support.slurm import slurm, slurm_two_nodes

__all__ = ["rank_server", "ranks", "slurm", "slurm_two_nodes", "three_hosts", "two_hosts"]

# Until all tests are collected: while modules are imported, collections find nothing to free.
gc.disable()

# Every Python that a test starts runs the `sitecustomize` there.
START_OF_PYTHON = str(Path(__file__).parent / "support" / "start_of_python")
if START_OF_PYTHON not in (given := os.environ.get("PYTHONPATH", "")).split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [given, START_OF_PYTHON]))

# Threads of torch that wait for work shall sleep. By default they spin, which on a machine where
# several tests share the cores takes them from the others: a third of the time of a short training.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts us in the background has SIGINT ignored, and whoever we start would inherit
# that: tests of Ctrl-C could not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Times on a shared machine say nothing; what must not hang has a time limit of its own.
SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# What held for a commit holds again: only the soak draws new examples.
settings.register_profile("test", derandomize=True, **SLOW_IS_FINE)
settings.register_profile("soak", max_examples=1000, **SLOW_IS_FINE)
SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
settings.load_profile("soak" if SOAK else "test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
    if "PYTEST_XDIST_WORKER" in os.environ:
        # These processes share the cores: threads of torch would wait for each other, and spin.
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Used by what makes network namespaces or clusters: mark `hosts` (see `support.costs`)."""


@pytest.fixture(scope="session")
def peers() -> None:
    """Used by what runs another program or library as reference or partner: mark `peers`."""


@pytest.fixture(scope="session")
def processes() -> None:
    """Used by what starts processes or has to sleep: mark `ranks`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make soak` runs each killing test ten times, or as often as its mark says; random tests have
    their profile above."""
    mark = metafunc.definition.get_closest_marker("soak")
    if SOAK and mark is not None and not is_hypothesis_test(metafunc.function):
        metafunc.fixturenames.append("soak_round")
        metafunc.parametrize("soak_round", range(mark.args[0] if mark.args else 10))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collection: half a million objects that stay.

    With them a collection takes a third of a second, and some tests ask for two.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def config_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Training a model of the user's own makes a key in the user's config folder: not in the
    tester's."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture
def soak_round() -> int:
    """Only there to be parametrised."""
    return 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every random test belongs to the soak."""
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.function):
            item.add_marker(pytest.mark.soak)
