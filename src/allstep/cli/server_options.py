"""The options of `allstep run` for parameter servers (docs/servers.md)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allstep.cli.horovod.elastic_flags import is_elastic
from allstep.cli.numbers import between
from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch import Job

Servers = Annotated[
    int | None,
    typer.Option(
        "--servers",
        metavar="N",
        callback=between("--servers", 1, 1024),
        help=(
            "Start N parameter servers besides the workers, for allstep.kvstore (default: the first"
            " worker of each host starts one when a script needs it)."
        ),
    ),
]
ServerHosts = Annotated[
    str | None,
    typer.Option(
        "--server-hosts",
        metavar="S1,S2",
        help="Hosts that run the servers, in turn (default: those of the workers).",
    ),
]


def with_servers(
    job: "Job", num_servers: int | None, text: str | None, flags: Mapping[str, Any]
) -> "Job":
    """Return a job with its servers, and with hosts that only run servers."""
    from allstep.launch import server_hosts, with_server_hosts

    if num_servers is not None and is_elastic(dict(flags)):
        raise ConfigError(
            f"--servers {num_servers} in an elastic run: its workers start servers themselves;"
            " leave out --servers, or --min-np"
        )
    found = server_hosts(text, num_servers)
    return replace(
        job,
        hosts=with_server_hosts(job.hosts, found),
        num_servers=num_servers or 0,
        server_hosts=tuple(host.label for host in found),
    )
