"""Turn what the probes reported about the hosts into findings."""

import shlex
from collections.abc import Iterator, Sequence

from allstep._version import __version__
from allstep.doctor.finding import Finding, note, problem, warning
from allstep.doctor.hosts import THIS_MACHINE, Connection, HostState, Visit
from allstep.doctor.packages import version_of

_CLOCK_SECONDS = 5.0
_MAX_PAIRS = 6


def find_all(visit: Visit, python: str) -> list[Finding]:
    """Return the findings about the hosts and the connections between them.

    `python` is the version of Python on this machine.
    """
    findings: list[Finding] = []
    for state in visit.states:
        findings += _not_well(state) if not state.well else _host_findings(state, python)
    several = len(visit.states) > 1 or not all(state.here for state in visit.states)
    return [
        *findings,
        *(_connections(visit.connections) if several else []),
        *_own_names(visit.states),
    ]


def _not_well(state: HostState) -> Iterator[Finding]:
    """Yield the findings about a host whose probe failed."""
    if state.resolves_to is None:
        yield warning(
            f"the name server does not answer for {state.label}",
            "check /etc/resolv.conf, or give its address",
        )
    if str(state.error).startswith("--iface"):
        yield problem(
            str(state.error), "name an interface that every host has, or leave --iface out"
        )
        return
    hint = (
        "check that it is up, and log in by hand once"
        if state.resolves_to
        else "check its name and `Host` in ~/.ssh/config"
    )
    yield problem(
        str(state.error),
        f"{hint}: `ssh -o BatchMode=yes -- {shlex.quote(state.host.name)} true` must work without"
        " a prompt",
    )


def _host_findings(state: HostState, python: str) -> Iterator[Finding]:
    """Yield the findings about a host whose probe answered: versions, cores, clock."""
    label, facts = state.label, state.facts
    if facts["allstep"] != __version__:
        yield problem(
            f"{label} has allstep {facts['allstep']}, here is {__version__}",
            "install the same version on every host",
        )
    if facts["torch"] is None:
        yield problem(
            f"{label} has no torch for this interpreter",
            f"install torch {version_of('torch') or ''} there".replace("  ", " "),
        )
    elif facts["torch"] != version_of("torch"):
        yield warning(
            f"{label} has torch {facts['torch']}, here is {version_of('torch')}",
            "install the same version on every host",
        )
    if facts["python"] != python:
        yield warning(
            f"{label} has Python {facts['python']}, here is {python}",
            "use the same interpreter on every host",
        )
    if state.host.slots > facts["cores"]["allowed"]:
        yield warning(
            f"{label} has {facts['cores']['allowed']} cores for {state.host.slots} workers: they"
            " will compete for cores",
            f"-H {state.host.name}:{facts['cores']['allowed']}",
        )
    if state.clock_offset is not None and abs(state.clock_offset) > _CLOCK_SECONDS:
        ahead = "ahead of" if state.clock_offset > 0 else "behind"
        yield warning(
            f"the clock of {label} is {abs(state.clock_offset):.0f} s {ahead} ours: times in logs"
            " will mislead",
            "set up NTP there",
        )


def _connections(connections: Sequence[Connection]) -> Iterator[Finding]:
    """Yield a problem for each failed connection; further ones are summed up in one."""
    failed = [connection for connection in connections if connection.error is not None]
    for connection in failed[:_MAX_PAIRS]:
        yield problem(
            f"{connection.source} cannot open a connection to {connection.target}:"
            f" {connection.error}",
            _advice(str(connection.error)),
        )
    if len(failed) > _MAX_PAIRS:
        rest = ", ".join(
            f"{connection.source} to {connection.target}"
            for connection in failed[_MAX_PAIRS : 4 * _MAX_PAIRS]
        )
        yield problem(f"{len(failed) - _MAX_PAIRS} more connections fail: {rest}", "as above")


def _advice(error: str) -> str:
    """Return what to do about a failed connection."""
    if "unreachable" in error or "No route" in error:
        return (
            "there is no route: check that both have an address in the same network, and name the"
            " interface with allstep run --iface"
        )
    return (
        "check for a firewall: open all ports above 1023 between the hosts, or name another"
        " interface with allstep run --iface"
    )


def _own_names(states: Sequence[HostState]) -> Iterator[Finding]:
    """Yield a note about hosts whose own name resolves to loopback.

    Other programs fail over this; allstep uses routes instead.
    """
    trapped = [
        f"{state.label} ({found[0]})"
        for state in states
        if not state.here and (found := state.facts.get("network", {}).get("resolves_to"))
        if all(address.startswith("127.") or address == "::1" for address in found)
    ]
    if trapped:
        yield note(
            f"on {', '.join(trapped)} the host's own name resolves to a loopback address",
            "nothing for allstep, which uses the interface that routes to the others; torchrun by"
            " host name would fail",
        )


def target_label(connection: Connection) -> str:
    """Return the label of the connection's target; "here" for this machine."""
    return "here" if connection.target == THIS_MACHINE else connection.target
