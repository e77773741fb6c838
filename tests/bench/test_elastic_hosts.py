"""`benchmarks/elastic_hosts.py`: two real hosts lose a worker, and then a host, once each."""

import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from conftest import SOAK
from support.hosts import SshHosts

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "elastic_hosts.py"
LOST_SECONDS = 2


def loaded() -> ModuleType:
    spec = spec_from_file_location("benchmark_elastic_hosts", SCRIPT)
    assert spec and spec.loader
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(500)
def test_a_killed_worker_and_a_cut_link(two_hosts: SshHosts) -> None:
    """The cut, which is most of the time, in `make soak` only."""
    script = loaded()
    found = script.recover(two_hosts, LOST_SECONDS, partial(script.kill, 3))
    assert 0 < found.noticed <= found.formed < found.stepped < 60
    if SOAK:
        found = script.recover(two_hosts, LOST_SECONDS, partial(script.cut, two_hosts))
        # The launcher gives a silent host up after 0.9 of these seconds at the earliest.
        assert 0.5 * LOST_SECONDS < found.noticed < found.stepped < 60
