"""The hosts of `allstep run`, from -H, --hostfile, a discovery script or a Slurm job."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allstep.cli.horovod.elastic_flags import discovery_of, is_elastic
from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch import Host


def wanted_workers(num_workers: int | None, flags: dict[str, Any], *, srun: bool) -> int | None:
    """Return the number of workers: -np, else horovodrun's names for it, --num-proc, --min-np.

    None: all slots. With --srun these are what the user asked Slurm for, so --min-np does not
    count there.
    """
    given = (num_workers, flags.get("num_proc"), None if srun else flags.get("min_np"))
    return next((number for number in given if number is not None), None)


def used_hosts(
    hosts: str | None,
    hostfile: Path | None,
    flags: dict[str, Any],
    num_workers: int | None,
    *,
    srun: bool,
) -> "list[Host]":
    """Return the hosts, with the number of workers of each as its slots.

    An elastic run may use all slots up to --max-np; on this machine alone as many as workers. Those
    of a discovery script that is polled are the first ones, possibly too few. srun: the hosts are
    nodes of this Slurm job, by default all of them.
    """
    from allstep.launch import allocation, assign, check_in_allocation

    nodes = allocation(os.environ) if srun else None
    discovery = discovery_of(flags)
    if discovery is not None:
        _check_one_source(hosts, hostfile, flags)
        return discovery.poll()
    most = num_workers
    if is_elastic(flags):
        most = max(num_workers or 0, flags.get("max_np") or 0)
    found = _hosts(hosts, hostfile, flags, most, nodes)
    if srun:
        check_in_allocation(found, os.environ)
    if is_elastic(flags) and (hosts or hostfile or srun):
        most = None if flags.get("max_np") is None else min(most or 0, sum(h.slots for h in found))
    return assign(found, most)


def _hosts(
    hosts: str | None,
    hostfile: Path | None,
    flags: dict[str, Any],
    num_workers: int | None,
    nodes: "list[Host] | None",
) -> "list[Host]":
    """Return the hosts that are named by option, file or script; else `nodes`.

    nodes: of a Slurm job; None: this machine for all workers.
    """
    from allstep.launch import Host, discover, parse_hosts, read_hostfile

    _check_one_source(hosts, hostfile, flags)
    script = flags.get("host_discovery_script")
    if hosts:
        return parse_hosts(hosts)
    if hostfile:
        return read_hostfile(hostfile)
    if script:
        return discover(script, flags.get("slots_per_host", 1))
    if nodes is not None:
        return nodes
    if num_workers is None:
        raise ConfigError(
            "the number of workers is missing: give -np N, or hosts with their slots: -H h1:2,h2:2"
        )
    return [Host("localhost", num_workers)]


def most_ranks(used: "list[Host]", flags: dict[str, Any]) -> int:
    """Return the largest number of ranks that a run may have."""
    from allstep.launch import MAX_WORKERS

    if discovery_of(flags) is None:
        return sum(host.slots for host in used)
    return flags.get("max_np") or MAX_WORKERS


def _check_one_source(hosts: str | None, hostfile: Path | None, flags: dict[str, Any]) -> None:
    """Raise ConfigError if more than one option names the hosts."""
    script = flags.get("host_discovery_script")
    named = {"-H": hosts, "--hostfile": hostfile, "--host-discovery-script": script}
    if len(given := [option for option, value in named.items() if value]) > 1:
        raise ConfigError(f"{' and '.join(given)} both name the hosts; give one of them")
