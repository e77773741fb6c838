"""Print the report: tables on a terminal, plain lines elsewhere."""

import platform
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from allstep._version import __version__
from allstep.console.escape import escaped
from allstep.console.quantities import nbytes
from allstep.doctor.finding import Finding, Severity
from allstep.doctor.host_checks import target_label
from allstep.doctor.hosts import HostState, Visit
from allstep.doctor.programs import Program
from allstep.doctor.report import Report

if TYPE_CHECKING:
    from rich.text import Text

Row = tuple[str, str]
_STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(report: Report) -> None:
    """Print the report to standard output."""
    if sys.stdout.isatty():
        _tables(report)
    else:
        print(escaped("\n".join(plain(report)), keep="\n"))


def plain(report: Report) -> Iterator[str]:
    """Yield the report as lines of text."""
    for title, rows in sections(report):
        yield f"{title}:"
        width = max(len(name) for name, _ in rows)
        yield from (f"  {name:<{width}}  {text}" for name, text in rows)
    yield "Findings:" if report.findings else "Findings: none"
    for finding in report.findings:
        yield f"  {finding.severity}: {finding.what}"
        yield f"    -> {finding.do}"
    yield verdict(report)


def _tables(report: Report) -> None:
    """Print the report as tables with colors."""
    from rich.console import Group
    from rich.padding import Padding

    from allstep.console.rich_table import cell, name_value_table, print_table

    for title, rows in sections(report):
        print_table(
            Group(cell(title, "bold"), Padding(name_value_table(rows, keep="\n"), (0, 0, 1, 2)))
        )
    for finding in report.findings:
        print_table(_colored(finding))
    print_table(cell(verdict(report), "bold green" if report.ok else "bold red"))


def _colored(finding: Finding) -> "Text":
    """Return the finding as text with the color of its severity."""
    from allstep.console.rich_table import cell

    severity = cell(f"{finding.severity}: ", _STYLES[finding.severity])
    return (
        severity + cell(finding.what) + cell("\n  -> ", "dim", keep="\n") + cell(finding.do, "dim")
    )


def verdict(report: Report) -> str:
    """Return the last line: whether a run should work, and the numbers of findings."""
    counts = [
        f"{count} {kind}{'s' if count > 1 else ''}"
        for kind in Severity
        if (count := _count(report, kind))
    ]
    state = "a run should work" if report.ok else "a run would fail"
    return f"{state} ({', '.join(counts) or 'nothing found'}; examined in {report.seconds:.1f} s)"


def _count(report: Report, kind: Severity) -> int:
    """Return the number of findings of this severity."""
    return sum(finding.severity is kind for finding in report.findings)


def sections(report: Report) -> Iterator[tuple[str, list[Row]]]:
    """Yield the sections of the report: title and rows."""
    yield "This machine", list(_machine(report))
    yield "Software", list(_software(report))
    yield "World", list(_world(report))
    if report.visit is not None:
        yield "Hosts", [(state.label, host_text(state)) for state in report.visit.states]
        if report.visit.connections:
            yield "Connections on a free port", list(_matrix(report.visit))


def _machine(report: Report) -> Iterator[Row]:
    """Yield the rows about hardware, limits and folders."""
    facts = report.facts
    cores, memory, shm, network = facts.cores, facts.memory, facts.shared_memory, facts.network
    quota = "no quota" if cores.quota is None else f"quota {cores.quota:g}"
    yield (
        "cores",
        (
            f"{cores.allowed} allowed (machine {cores.machine}, affinity mask {cores.affinity},"
            f" {quota})"
        ),
    )
    limit = f", cgroup limit {nbytes(memory.limit)}" if memory.limit else ""
    yield "memory", f"{nbytes(memory.available)} available of {nbytes(memory.total)}{limit}"
    free = (
        "no /dev/shm"
        if shm.size is None
        else f"/dev/shm {nbytes(shm.size)}, {nbytes(shm.free or 0)} free"
    )
    yield "shared memory", f"{'memfd works' if shm.memfd else 'memfd does not work'}; {free}"
    yield "GPUs", "; ".join(facts.torch.devices or facts.gpus) or "none"
    own = network.resolves_to
    resolved = "no answer" if own is None else ", ".join(own) or "does not resolve"
    yield "host name", f"{network.hostname} -> {resolved}"
    yield (
        "interfaces",
        "; ".join(
            f"{name} {', '.join(found)}" for name, found in network.interfaces.items() if found
        ),
    )
    yield (
        "open files",
        f"{_count_text(facts.open_files[0])} (may be raised to {_count_text(facts.open_files[1])})",
    )
    for folder in facts.folders:
        yield folder.purpose, folder.path


def _software(report: Report) -> Iterator[Row]:
    """Yield the rows about allstep, torch, programs and packages."""
    facts = report.facts
    engine, programs = facts.torch, facts.programs
    yield "allstep", f"{__version__}, Python {platform.python_version()} ({sys.executable})"
    if engine.error:
        yield "torch", f"cannot be imported: {engine.error}"
    else:
        have = [name for name, there in engine.backends.items() if there]
        lack = [name for name, there in engine.backends.items() if not there]
        built = f"CUDA {engine.cuda}" if engine.cuda else "CPU only"
        yield (
            "torch",
            (
                f"{engine.version}, {built}; backends: {', '.join(have) or 'none'} (not:"
                f" {', '.join(lack) or 'none'})"
            ),
        )
    yield "frameworks", _frameworks(facts.frameworks)
    for title, name in (("MPI", "mpirun"), ("Slurm", "srun"), ("ssh", "ssh")):
        yield title, _program(programs[name])
    if job := facts.env.get("SLURM_JOB_ID"):
        step = facts.env.get("SLURM_STEP_ID")
        yield (
            "Slurm job",
            f"{job}, {f'in step {step}' if step else 'outside a step: srun starts one'}",
        )
    needed = [
        package for package in facts.packages if package.extra is None and package.name != "torch"
    ]
    optional = [package for package in facts.packages if package.extra is not None]
    for title, packages in (("packages", needed), ("optional", optional)):
        if packages:
            yield (
                title,
                ", ".join(f"{package.name} {package.version or '(none)'}" for package in packages),
            )


def _frameworks(versions: Mapping[str, str | None]) -> str:
    """Return the frameworks besides torch, which has its own row, as text."""
    others = {name: version for name, version in versions.items() if name != "PyTorch"}
    have = [f"{name} {version}" for name, version in others.items() if version]
    lack = [name for name, version in others.items() if not version]
    return f"{', '.join(have) or 'none'} (not: {', '.join(lack) or 'none'})"


def _program(program: Program) -> str:
    """Return version and path of a program as text."""
    return f"{program.version or program.error} ({program.path})" if program.path else "none"


def _world(report: Report) -> Iterator[Row]:
    """Yield the rows about the launcher, what a run would use, and the trial."""
    world, choice = report.facts.world, report.facts.choice
    if world is None:
        yield "found", "unknown, see the problems"
    elif world.launcher == "none":
        yield "found", "no launcher: a world of one"
    else:
        place = (
            f"rank {world.rank} of {world.size}, local rank {world.local_rank} of"
            f" {world.local_size} on {world.host}"
        )
        yield "found", f"{place}, from {world.launcher}"
    yield "a run now", choice.command
    yield (
        "workers",
        f"{choice.workers}, {choice.threads} thread{'s' if choice.threads > 1 else ''} each",
    )
    yield "backend", choice.backend
    yield "rendezvous", choice.meeting
    if report.trial is not None:
        yield "trial", _trial(report)


def _trial(report: Report) -> str:
    """Return the result of the trial as text."""
    trial = report.trial
    assert trial is not None
    if trial.error is not None:
        return f"{trial.ranks} ranks failed after {trial.seconds:.1f} s\n{trial.error}".replace(
            "\n", "\n    "
        )
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in trial.phases.items())
    return f"{trial.ranks} ranks joined and summed a tensor in {trial.seconds:.1f} s ({phases})"


def host_text(state: HostState) -> str:
    """Return the facts about a host, or its error, as one line."""
    if state.here:
        where = "this machine"
    elif state.resolves_to:
        where = state.resolves_to[0]
    else:
        where = (
            "no answer from the name server" if state.resolves_to is None else "known to ssh only"
        )
    if state.error is not None:
        return f"{where}; {state.error}"
    facts = state.facts
    how = "" if state.here else f"ssh and Python answer in {state.seconds:.1f} s; "
    clock = f"clock {state.clock_offset:+.2f} s"
    return (
        f"{where}; {how}{facts['cores']['allowed']} cores, {nbytes(facts['memory']['available'])}"
        f" free; allstep {facts['allstep']}, torch {facts['torch']}, Python {facts['python']};"
        f" {clock}"
    )


def _matrix(visit: Visit) -> Iterator[Row]:
    """Yield one row per host: which hosts it reaches, and through which interface."""
    for state in visit.states:
        row = [connection for connection in visit.connections if connection.source == state.label]
        if row:
            results = [f"{target_label(c)} {'ok' if c.error is None else 'FAILS'}" for c in row]
            through = ", ".join(sorted({c.interface for c in row if c.interface}))
            yield (
                f"from {state.label}",
                ", ".join(results) + (f" (through {through})" if through else ""),
            )


def _count_text(number: int) -> str:
    """Return a limit as text; negative means unlimited."""
    return "unlimited" if number < 0 else str(number)
