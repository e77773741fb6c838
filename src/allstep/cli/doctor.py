"""`allstep doctor`: what this machine has, what allstep will use, and what is wrong with how to fix
it."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch import Host


def doctor(
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", help="Also look at these hosts: h1:2,h2:4.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="A file with one host a line: h1 slots=2.")
    ] = None,
    iface: Annotated[
        str | None, typer.Option(help="The network interface between the hosts.")
    ] = None,
    ssh: Annotated[
        str, typer.Option(envvar="ALLSTEP_SSH", help="The ssh command for other hosts.")
    ] = "ssh",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the trial run.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print everything that was found as JSON.")
    ] = False,
    launcher: Annotated[
        str | None, typer.Option(help="Whose word counts about the world, instead of finding out.")
    ] = None,
) -> None:
    """Look at this machine, or at several hosts, and say what is wrong.

    The exit status is 1 when a run would fail.
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
    from allstep.launch import parse_hosts, read_hostfile

    if hosts and hostfile:
        raise ConfigError("-H and --hostfile both name the hosts; give one of them")
    if hosts:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile else []
