"""The address of a host whose agent was not started by sshd."""

import pytest

from allstep import machine
from allstep.errors import ConfigError
from allstep.launch.hosts import addresses
from allstep.launch.hosts.addresses import choose_address

OURS = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "docker0": ["172.17.0.1"]}


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways to 10.* and fd00::*, and one name."""
    ways = {"10.": "10.0.0.1", "fd00:": "fd00::1"}
    monkeypatch.setattr(
        machine,
        "route_to",
        lambda to: next((ways[start] for start in ways if to.startswith(start)), None),
    )
    monkeypatch.setattr(
        addresses, "_resolve", lambda name: {"10.9.0.2"} if name == "known" else set()
    )


@pytest.mark.parametrize(
    ("label", "theirs", "expected"),
    [
        ("far", {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.2"]}, "10.0.0.2"),
        ("far", {"eth0": ["192.168.1.1"], "eth1": ["fd00::2", "10.0.0.2"]}, "10.0.0.2"),
        ("far", {"eth0": ["fd00::2"]}, "fd00::2"),
        ("known", {"eth0": ["10.0.0.2"], "ib0": ["10.9.0.2"]}, "10.9.0.2"),
        ("far", {"eth0": ["10.0.0.2"], "ib0": ["10.9.0.2"]}, "10.0.0.2"),
        ("this machine", OURS, "127.0.0.1"),
    ],
)
def test_choice(label: str, theirs: dict[str, list[str]], expected: str) -> None:
    assert choose_address(label, theirs, OURS) == expected


@pytest.mark.parametrize(
    ("theirs", "listed"),
    [
        ({}, "none"),
        ({"lo": ["127.0.0.1"]}, "none"),
        ({"a": ["172.17.0.1"], "b": ["8.8.8.8"]}, "172.17.0.1, 8.8.8.8"),
    ],
)
def test_no_address_can_be_reached(theirs: dict[str, list[str]], listed: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"far: .*\({listed}\); set the interface to use with --iface"
    ):
        choose_address("far", theirs, OURS)
