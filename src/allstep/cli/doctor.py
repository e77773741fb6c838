"""`allstep doctor`: report what this machine has, what allstep will use, and what to fix."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.options import Iface, Launcher, Ssh
from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch import Host

Hosts = Annotated[
    str | None, typer.Option("-H", "--hosts", help="Also examine these hosts: h1:2,h2:4.")
]
Hostfile = Annotated[Path | None, typer.Option(help="File with one host per line: h1 slots=2.")]
Quick = Annotated[bool, typer.Option("--quick", help="Skip the trial run.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def doctor(
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    iface: Iface = None,
    ssh: Ssh = "ssh",
    quick: Quick = False,
    json: Json = False,
    launcher: Launcher = None,
) -> None:
    """Examine this machine, or several hosts, and report problems with their remedies.

    The exit status is 1 if a run would fail.
    """
    from allstep.doctor import Asked, examine, follow
    from allstep.doctor.print import show

    asked = Asked(_hosts(hosts, hostfile), ssh, iface, quick, launcher)
    if follow(asked):
        return
    report = examine(asked)
    if json:
        print(json_format.dumps(report.to_json(), indent=2))
    else:
        show(report)
    raise typer.Exit(0 if report.ok else 1)


def _hosts(hosts: str | None, hostfile: Path | None) -> "list[Host]":
    """Return the hosts that -H or --hostfile names; raise ConfigError if both are given."""
    from allstep.launch import parse_hosts, read_hostfile

    if hosts and hostfile:
        raise ConfigError("-H and --hostfile both name the hosts; give one of them")
    if hosts:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile else []
