"""`allstep run`: start a command on many workers."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch import Host


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What every worker runs; a .py file is run with Python.")
    ],
    num_workers: Annotated[
        int | None,
        typer.Option("-np", "-n", "--num-workers", metavar="N", help="How many workers; all slots of -H if not given."),
    ] = None,
    hosts: Annotated[str | None, typer.Option("-H", "--hosts", help="Hosts and their slots: h1:2,h2:4.")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="A file with one host a line: h1 slots=2.")] = None,
    iface: Annotated[str | None, typer.Option(help="The network interface between the hosts.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Also write one file per rank into this folder.")] = None,
    show: Annotated[str | None, typer.Option(metavar="0,3", help="Print the lines of these ranks only.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds between a forwarded signal and SIGKILL.")] = 30.0,
    ssh: Annotated[str, typer.Option(envvar="ALLSTEP_SSH", help="The ssh command for other hosts.")] = "ssh",
) -> None:
    """Start COMMAND on many workers, here or on several hosts, and show their lines and the first error.

    The workers find each other by allstep.init(), by torch.distributed's own variables, or by Horovod's API of allstep.
    """
    from allstep.launch import Job, Launcher, assign

    _refuse_to_multiply()
    used = assign(_hosts(hosts, hostfile, num_workers), num_workers)
    size = sum(host.slots for host in used)
    job = Job(
        _with_interpreter(command),
        used,
        env={name: value for name, value in os.environ.items() if name != "ALLSTEP_LAUNCHER"},
        show=_ranks(show, size),
        log_dir=log_dir,
        iface=iface,
        ssh=ssh,
        grace=grace,
    )
    raise typer.Exit(Launcher(job).run())


def _refuse_to_multiply() -> None:
    """A launcher that another one started N times would start everything N times."""
    from allstep.world import World

    world = World.detect()
    if world.size > 1:
        raise ConfigError(
            f"{world.launcher} started `allstep run` itself {world.size} times: start it once, or give the command to {world.launcher} "
            "without `allstep run`"
        )


def _hosts(hosts: str | None, hostfile: Path | None, num_workers: int | None) -> "list[Host]":
    from allstep.launch import Host, parse_hosts, read_hostfile

    if hosts and hostfile:
        raise ConfigError("-H and --hostfile both name the hosts; give one of them")
    if hosts:
        return parse_hosts(hosts)
    if hostfile:
        return read_hostfile(hostfile)
    if num_workers is None:
        raise ConfigError("how many workers? Say -np N, or name hosts with their slots: -H h1:2,h2:2")
    return [Host("localhost", num_workers)]


def _ranks(text: str | None, size: int) -> frozenset[int] | None:
    if text is None:
        return None
    try:
        ranks = frozenset(int(item) for item in text.split(","))
    except ValueError:
        raise ConfigError(f"--show {text}: give ranks like 0,3") from None
    for rank in sorted(ranks):
        if not 0 <= rank < size:
            raise ConfigError(f"--show {text}: there is no rank {rank} among {size} workers (0 to {size - 1})")
    return ranks


def _with_interpreter(command: list[str]) -> list[str]:
    """A script is run with the interpreter that runs us."""
    return [sys.executable, *command] if command[0].endswith(".py") and not os.access(command[0], os.X_OK) else command
