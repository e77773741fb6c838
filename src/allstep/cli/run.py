"""`allstep run`: start a command on many workers.

It also accepts the flags of horovodrun; allstep's `bin/horovodrun` calls this verb.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allstep.cli.horovod.elastic_flags import (
    discovery_of,
    idle_options,
    policy_of,
    with_max_failures,
    with_minimum,
)
from allstep.cli.horovod.flags import takes_horovod_flags
from allstep.cli.horovod.flags_table import CONTROLLERS, idle_line, read_config, variables
from allstep.cli.options import (
    Faults,
    Iface,
    MaxFailures,
    Ssh,
    StopSignal,
    use_stop_signal,
)
from allstep.cli.run_hosts import most_ranks, used_hosts, wanted_workers
from allstep.cli.server_options import ServerHosts, Servers, with_servers
from allstep.console.escape import print_notice
from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch import Job, Launcher


def _check_build(asked: bool) -> None:
    """Print horovodrun's table of what is built in, and exit, if --check-build is given."""
    if asked:
        from allstep.cli.horovod.check_build import table

        print(table())
        raise typer.Exit


def _version(asked: bool) -> None:
    """Print the version of Horovod whose API allstep has, and exit, if --version is given."""
    if asked:
        from allstep.launch.horovod import API_VERSION

        print(API_VERSION)
        raise typer.Exit


Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND...", help="Command of every worker; a .py file runs with Python."
    ),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        "-np",
        "-n",
        "--num-workers",
        metavar="N",
        help="Number of workers (default: all slots of -H).",
    ),
]
Hosts = Annotated[
    str | None, typer.Option("-H", "--hosts", help="Hosts and their slots: h1:2,h2:4.")
]
Hostfile = Annotated[
    Path | None,
    typer.Option("--hostfile", "-hostfile", help="File with one host per line: h1 slots=2."),
]
LogDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Also write the output of each rank to a file in this folder."
    ),
]
Show = Annotated[
    str | None, typer.Option(metavar="0,3", help="Print the output of these ranks only.")
]
Grace = Annotated[float, typer.Option(help="Seconds from a forwarded signal to SIGKILL.")]
Srun = Annotated[
    bool,
    typer.Option(
        "--srun",
        help="In a Slurm job: start one agent per node by srun, on all its nodes if -H is missing.",
    ),
]
EnvOnly = Annotated[
    str | None,
    typer.Option(
        "--env-only",
        metavar="NAME,...",
        help="Send only these variables to other hosts (default: almost all; docs/security.md).",
    ),
]
AsHorovod = Annotated[
    bool,
    typer.Option("--as-horovod", help="Let `import horovod.torch` in the workers import allstep."),
]
AsHorovodrun = Annotated[
    bool,
    typer.Option(
        "--as-horovodrun",
        help="Like --as-horovod, and prefix lines as horovodrun does: [0]<stdout>:",
    ),
]
ReplaceGloo = Annotated[
    bool,
    typer.Option(
        "--replace-gloo",
        help='Give torch.distributed programs that request gloo the backend "allstep".',
    ),
]
CheckBuild = Annotated[
    bool,
    typer.Option(
        "-cb",
        "--check-build",
        callback=_check_build,
        is_eager=True,
        hidden=True,
        help="Show what is built in and exit.",
    ),
]
Version = Annotated[
    bool, typer.Option("-v", "--version", callback=_version, is_eager=True, hidden=True)
]


@takes_horovod_flags
def run(
    command: Command,
    num_workers: NumWorkers = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    iface: Iface = None,
    log_dir: LogDir = None,
    show: Show = None,
    grace: Grace = 30.0,
    ssh: Ssh = "ssh",
    srun: Srun = False,
    stop_signal: StopSignal = None,
    env_only: EnvOnly = None,
    as_horovod: AsHorovod = False,
    as_horovodrun: AsHorovodrun = False,
    replace_gloo: ReplaceGloo = False,
    max_failures: MaxFailures = None,
    fault: Faults = None,
    servers: Servers = None,
    server_hosts: ServerHosts = None,
    check_build: CheckBuild = False,
    version: Version = False,
    *,
    horovod: dict[str, Any],
) -> None:
    """Start COMMAND on many workers, here or on several hosts; show their output and first error.

    The workers find each other with allstep.init(), with torch.distributed's own variables, or with
    allstep's version of Horovod's API. The flags of horovodrun are accepted as well.
    """
    from allstep import faults
    from allstep.launch import Job, parse_env_only

    _refuse_to_multiply()
    faults.add(fault or [])
    use_stop_signal(stop_signal)
    flags = _with_file(horovod)
    exported = variables(flags)
    wanted = wanted_workers(num_workers, flags, srun=srun)
    flags = with_minimum(flags, wanted, as_horovodrun=as_horovodrun)
    flags = with_max_failures(flags, max_failures)
    used = used_hosts(hosts, hostfile, flags, wanted, srun=srun)
    size = most_ranks(used, flags)
    env = _environment(exported, as_horovod or as_horovodrun, replace_gloo)
    job = Job(
        _with_interpreter(command),
        used,
        env=env,
        env_only=None if env_only is None else parse_env_only(env_only, env),
        show=_ranks(show, size),
        log_dir=_folder("--log-dir", log_dir),
        stream_dir=_folder("--output-filename", flags.get("output_filename")),
        prefix="horovod" if as_horovodrun else "allstep",
        timestamps=bool(flags.get("prefix_output_with_timestamp")),
        iface=iface or _interface(flags.get("network_interfaces", [])),
        ssh=_ssh(ssh, flags),
        srun=srun,
        grace=grace,
        max_workers=size,
    )
    job = with_servers(job, servers, server_hosts, flags)
    if idle := idle_options(flags, as_horovodrun=as_horovodrun):
        _notice(f"without effect here: {idle}")
    _announce(job, flags, exported, replace_gloo)
    raise typer.Exit(_launcher(job, flags, wanted, as_horovodrun).run())


def _launcher(
    job: "Job", flags: dict[str, Any], num_workers: int | None, as_horovodrun: bool
) -> "Launcher":
    """Return the launcher of a fixed world, or that of a run that continues after a loss."""
    from allstep.launch import ElasticLauncher, Launcher
    from allstep.parallel.sync_mode import VARIABLE

    num_workers = num_workers or sum(host.slots for host in job.hosts)
    sync = job.env.get(VARIABLE, "")
    policy = policy_of(flags, num_workers, job.grace, sync, as_horovodrun=as_horovodrun)
    return Launcher(job) if policy is None else ElasticLauncher(job, policy, discovery_of(flags))


def _announce(
    job: "Job", flags: dict[str, Any], exported: dict[str, str], replace_gloo: bool
) -> None:
    """Print the effects of the flags that may surprise the user, and with --verbose all of them."""
    from allstep.launch.replace_gloo import LINE

    if replace_gloo:
        _notice(LINE)
    if idle := idle_line(flags):
        _notice(f"without effect here: {idle}")
    if flags.get("verbose"):
        _notice(
            f"{', '.join(f'{host.label}:{host.slots}' for host in job.hosts)} will run"
            f" {shlex.join(job.command)}"
        )
        _notice(
            "set by flags:"
            f" {' '.join(f'{name}={value}' for name, value in exported.items()) or 'nothing'}"
        )


def _notice(text: str) -> None:
    """Print one line to standard error, with the prefix "allstep run"."""
    print_notice(text, "allstep run")


def _refuse_to_multiply() -> None:
    """Raise ConfigError under another launcher, which would start all workers N times."""
    from allstep.world import World

    world = World.detect()
    if world.size > 1:
        raise ConfigError(
            f"{world.launcher} started `allstep run` itself {world.size} times: start it once, or"
            f" give the command to {world.launcher} without `allstep run`"
        )


def _with_file(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the given flags, completed by those of --config-file; the given ones win."""
    path = flags.get("config_file")
    if path is None:
        return flags
    values, unknown = read_config(path)
    if unknown:
        _notice(f"{path}: unknown keys are ignored: {', '.join(unknown)}")
    if any(flags.get(name) for name in CONTROLLERS):
        values = {name: value for name, value in values.items() if name not in CONTROLLERS}
    return {**values, **flags}


def _environment(exported: dict[str, str], as_horovod: bool, replace_gloo: bool) -> dict[str, str]:
    """Return the workers' environment: ours, the variables of the flags, and the replacements."""
    from allstep.launch.horovod import with_horovod
    from allstep.launch.replace_gloo import with_gloo_replaced

    env = {
        name: value for name, value in os.environ.items() if name != "ALLSTEP_LAUNCHER"
    } | exported
    env = with_horovod(env) if as_horovod else env
    return with_gloo_replaced(env) if replace_gloo else env


def _folder(option: str, text: str | None) -> Path | None:
    """Return the folder that `option` names; raise ConfigError if the name is empty.

    Path would turn an empty name into the current folder.
    """
    if text is None:
        return None
    if not text:
        raise ConfigError(
            f"{option}: the name is empty; expected a folder (`.` is the current one)"
        )
    return Path(text)


def _interface(given: list[str]) -> str | None:
    """Return the first interface that horovodrun's flags name; print a notice if there are more."""
    names = list(dict.fromkeys(name for text in given for name in text.split(",") if name))
    if len(names) > 1:
        _notice(f"interfaces {', '.join(names)}: only the first is used")
    return names[0] if names else None


def _ssh(command: str, flags: dict[str, Any]) -> str:
    """Return the ssh command with the port and the identity file of horovodrun's flags."""
    port, identity = flags.get("ssh_port"), flags.get("ssh_identity_file")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"--ssh-port {port}: a port is a number from 1 to 65535")
    options = ["-p", str(port)] if port is not None else []
    options += ["-i", identity] if identity is not None else []
    return f"{command} {shlex.join(options)}" if options else command


def _ranks(text: str | None, size: int) -> frozenset[int] | None:
    """Return the ranks that --show names; None: all."""
    if text is None:
        return None
    try:
        ranks = frozenset(int(item) for item in text.split(","))
    except ValueError:
        raise ConfigError(f"--show {text}: give ranks like 0,3") from None
    for rank in sorted(ranks):
        if not 0 <= rank < size:
            raise ConfigError(
                f"--show {text}: there is no rank {rank} among {size} workers (0 to {size - 1})"
            )
    return ranks


def _with_interpreter(command: list[str]) -> list[str]:
    """Return the command; a .py file that is not executable is run by our own interpreter."""
    return (
        [sys.executable, *command]
        if command[0].endswith(".py") and not os.access(command[0], os.X_OK)
        else command
    )
