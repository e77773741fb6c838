"""Turn facts about this machine into findings: one function per possible problem.

A check reads the facts and yields findings, or nothing. A new check is a function and a line in
`CHECKS`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from allstep.console.quantities import nbytes
from allstep.doctor.choice import Choice, user_threads
from allstep.doctor.finding import Finding, note, problem, warning
from allstep.doctor.machine_facts import Cores, Folder, Network, SharedMemory
from allstep.doctor.packages import Package, at_least
from allstep.doctor.programs import Program
from allstep.doctor.torch_probe import Engine
from allstep.errors import ConfigError
from allstep.limits import read_limits
from allstep.machine import Memory, threads_by_user
from allstep.world import NONE, World

# Memory of a worker without model and data: Python and torch.
_WORKER_BYTES = 300 << 20
_SMALL_SHM = 1 << 30
_FEW_FILES, _TOO_FEW_FILES = 1024, 64
_FOUND_BY_FILE = ("horovod", "openmpi", "mpich", "slurm", "pals", "lsf")


@dataclass(frozen=True)
class Facts:
    """All facts about this machine and this process."""

    cores: Cores
    memory: Memory
    shared_memory: SharedMemory
    open_files: tuple[int, int]
    folders: list[Folder]
    network: Network
    programs: dict[str, Program]
    gpus: list[str]
    packages: list[Package]
    frameworks: Mapping[str, str | None]
    """Installed version of each framework with a front-end, by its name; None: not installed."""
    torch: Engine
    world: World | None
    world_error: str | None
    choice: Choice
    num_hosts: int
    """Number of hosts of the run: those of -H, or of the world."""
    needs_ssh: bool
    """Whether a host of -H is another machine, and --ssh does not replace ssh."""
    env: Mapping[str, str]


def find_all(facts: Facts) -> list[Finding]:
    """Run all checks and return their findings, the most severe first."""
    return in_order([finding for check in CHECKS for finding in check(facts)])


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings: problems, then warnings, then notes."""
    order = list(type(findings[0].severity)) if findings else []
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _world(facts: Facts) -> Iterator[Finding]:
    if facts.world_error:
        yield problem(
            f"the launcher's variables contradict each other: {facts.world_error}",
            "unset the variables of the launcher that is not in use, or name the one that is:"
            f" ALLSTEP_LAUNCHER ({NONE}: a world of one)",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    try:
        read_limits(facts.env)
    except ConfigError as error:
        yield problem(str(error), "unset it, or give a number of seconds")


def _torch(facts: Facts) -> Iterator[Finding]:
    engine = facts.torch
    package = next((package for package in facts.packages if package.name == "torch"), None)
    least, below = (package.least, package.below) if package else (None, None)
    if engine.error:
        yield problem(
            f"torch cannot be imported: {engine.error}",
            "install it for this interpreter: pip install torch",
        )
    elif engine.version and least and not at_least(engine.version, least):
        yield problem(
            f"torch {engine.version} is too old; allstep needs {least} or later",
            "pip install --upgrade torch",
        )
    elif engine.version and below and at_least(engine.version, below):
        yield warning(
            f"torch {engine.version} is too new; allstep is tested with versions before {below}",
            f"pip install 'torch>={least},<{below}'",
        )
    elif not engine.backends.get("gloo"):
        yield problem(
            "this torch has no Gloo, which ranks on CPUs need to communicate",
            "install a build of torch with distributed support",
        )


def _gpus(facts: Facts) -> Iterator[Finding]:
    engine = facts.torch
    if engine.error:
        return
    if engine.cuda and not engine.devices:
        yield warning(
            f"torch is built for CUDA {engine.cuda} but finds no GPU:"
            f" {engine.device_error or 'no device'}; runs will use the CPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or ignore this on a machine without a GPU",
        )
    if facts.gpus and not engine.cuda:
        yield warning(
            f"the driver shows {len(facts.gpus)} GPU(s), but torch {engine.version} is built"
            " without CUDA: runs will use the CPU",
            "install a CUDA build of torch to use them",
        )


def _packages(facts: Facts) -> Iterator[Finding]:
    for package in facts.packages:
        wanted = f"{package.name}>={package.least}" if package.least else package.name
        if package.name == "torch" or package.good:
            continue
        if package.extra is None:
            yield problem(
                f"allstep needs {wanted}; installed is {package.version or 'none'}",
                f"pip install '{wanted}'",
            )
        elif package.version is not None:
            yield warning(
                f"{package.name} {package.version} is older than {package.least}",
                f"pip install '{wanted}'",
            )


def _threads(facts: Facts) -> Iterator[Finding]:
    given = threads_by_user(facts.env)
    if not given or (facts.world and facts.world.launcher == "torchrun" and given == "1"):
        return
    threads, local = user_threads(), max(1, facts.choice.workers // max(1, facts.num_hosts))
    fair = max(1, facts.cores.allowed // local)
    unset = f"unset OMP_NUM_THREADS: allstep then gives each worker {fair}"
    if threads is None:
        yield warning(
            f"OMP_NUM_THREADS={given!r} is not a number above 0: torch takes all cores in every"
            " worker",
            unset,
        )
    elif threads * local > facts.cores.allowed and threads > 1:
        yield warning(
            f"OMP_NUM_THREADS={given} x {local} workers is more than the"
            f" {facts.cores.allowed} cores allowed: they will compete for cores",
            unset,
        )
    elif threads < fair:
        yield warning(
            f"OMP_NUM_THREADS={given} leaves cores idle: there are {fair} for each of {local}"
            " workers",
            unset,
        )


def _open_files(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts.open_files
    most = "more" if hard < 0 else str(hard)
    raise_it = (
        f"ulimit -n {max(_FEW_FILES, min(hard, 4096) if hard > 0 else 4096)} (up to {most} is"
        " allowed here)"
    )
    if 0 <= soft < _TOO_FEW_FILES:
        yield problem(f"a process may open only {soft} files: workers will not start", raise_it)
    elif 0 <= soft < _FEW_FILES:
        yield warning(
            f"a process may open only {soft} files; many workers or data files need more", raise_it
        )


def _folders(facts: Facts) -> Iterator[Finding]:
    advice = {
        "temporary files": "set TMPDIR to a folder that you may write to",
        "downloads": (
            "set ALLSTEP_CACHE to a folder that you may write to; only data that has to be"
            " downloaded needs it"
        ),
        "run folders": "start from another folder, or give --out",
    }
    for folder in facts.folders:
        if folder.error is None:
            continue
        hopeless = folder.purpose == "temporary files" and "instead" not in folder.error
        make = problem if hopeless else warning
        yield make(
            f"the folder for {folder.purpose} cannot be written: {folder.error}",
            advice[folder.purpose],
        )


def _runtime_folder(facts: Facts) -> Iterator[Finding]:
    error = facts.torch.runtime_folder_error
    if error:
        needed = (
            facts.world is not None
            and facts.world.launcher in _FOUND_BY_FILE
            and facts.num_hosts == 1
        )
        make = problem if needed else warning
        yield make(
            "the run-time folder, through which ranks under mpirun and srun find each other, cannot"
            f" be used: {error}",
            "remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory, needed = facts.memory, facts.choice.workers * _WORKER_BYTES // max(1, facts.num_hosts)
    whose = "the cgroup's limit" if memory.limit and memory.limit < memory.total else "the machine"
    if memory.available < needed:
        yield warning(
            f"{nbytes(memory.available)} of memory are available under {whose}; the workers alone"
            f" need {nbytes(needed)} before any data",
            "end other programs that use memory, raise the container's or job's limit, or start"
            " fewer workers",
        )


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    shm = facts.shared_memory
    size = "missing" if shm.size is None else nbytes(shm.size)
    if not shm.memfd:
        yield warning(
            f"memfd_create does not work here, so ranks share memory through /dev/shm ({size})",
            "give a container more of it (docker run --shm-size=8g), or allow memfd_create in its"
            " seccomp profile",
        )
    elif shm.size is None or shm.size < _SMALL_SHM:
        yield note(
            f"/dev/shm is {'missing' if shm.size is None else f'only {size}'}; allstep uses memfd"
            " instead",
            "nothing, unless a DataLoader of torch with workers is used: docker run --shm-size=8g",
        )


def _own_name(facts: Facts) -> Iterator[Finding]:
    found, who = facts.network.resolves_to, f"this machine's own name {facts.network.hostname}"
    fix = "add the name with its outside address to /etc/hosts"
    if found is None:
        yield warning(f"the name server does not answer for {who}", fix)
    elif not found:
        yield warning(f"{who} does not resolve; some programs wait or fail because of it", fix)
    elif facts.num_hosts > 1 and all(
        address.startswith("127.") or address == "::1" for address in found
    ):
        ours = facts.world is None or facts.world.launcher in (NONE, "allstep")
        make = note if ours else warning
        yield make(
            f"{who} resolves to {found[0]}, where other hosts cannot reach it",
            "nothing for allstep, which uses the interface that routes to the other hosts; for"
            f" other programs {fix}",
        )


def _interface(facts: Facts) -> Iterator[Finding]:
    named = facts.env.get("GLOO_SOCKET_IFNAME", "")
    for interface in filter(None, named.split(",")):
        if not facts.network.interfaces.get(interface):
            known = ", ".join(
                name for name, addresses in facts.network.interfaces.items() if addresses
            )
            yield problem(
                f"GLOO_SOCKET_IFNAME={named}, but this machine has no interface {interface} with an"
                f" address; it has {known}",
                "unset GLOO_SOCKET_IFNAME: allstep finds the interface by itself",
            )


def _ssh(facts: Facts) -> Iterator[Finding]:
    if facts.programs["ssh"].path is None:
        if facts.needs_ssh:
            yield problem(
                "there is no ssh client, and other hosts are reached by it",
                "install one (Debian: openssh-client)",
            )
        else:
            yield note(
                "there is no ssh client: `allstep run -H` can use this machine only",
                "install openssh-client for other hosts",
            )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _world,
    _limits,
    _torch,
    _packages,
    _interface,
    _ssh,
    _open_files,
    _folders,
    _runtime_folder,
    _gpus,
    _threads,
    _memory,
    _own_name,
    _shared_memory,
)


def environment() -> dict[str, str]:
    """Return the environment variables that affect a run; values of secrets are hidden."""
    prefixes = (
        "ALLSTEP_",
        "HOROVOD_",
        "OMP_",
        "GLOO_",
        "NCCL_",
        "MASTER_",
        "CUDA_VISIBLE",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
    )
    hidden = ("TOKEN", "SECRET", "PASSWORD", "KEY")
    return {
        name: "(hidden)" if any(part in name for part in hidden) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes)
    }
