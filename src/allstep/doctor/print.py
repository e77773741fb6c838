"""The report for people: tables on a terminal, plain lines elsewhere."""

import platform
import sys
from collections.abc import Iterator

from allstep._version import __version__
from allstep.console.escape import escaped
from allstep.console.quantities import nbytes
from allstep.doctor.finding import Finding, Severity
from allstep.doctor.host_checks import target_label
from allstep.doctor.hosts import Station, Visit
from allstep.doctor.programs import Program
from allstep.doctor.report import Report

Row = tuple[str, str]
_STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(report: Report) -> None:
    """Print it."""
    if sys.stdout.isatty():
        _tables(report)
    else:
        print(escaped("\n".join(plain(report)), keep="\n"))


def plain(report: Report) -> Iterator[str]:
    """The report as lines of text."""
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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, rows in sections(report):
        table = Table(title=title, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(Text(escaped(name)), Text(escaped(text, keep="\n")))
        console.print(table)
    for finding in report.findings:
        console.print(_coloured(finding))
    console.print(Text(verdict(report), style="bold green" if report.ok else "bold red"))


def _coloured(finding: Finding) -> "object":
    from rich.text import Text

    text = Text()
    text.append(f"{finding.severity}: ", style=_STYLES[finding.severity])
    text.append(escaped(finding.what))
    text.append(f"\n  -> {escaped(finding.do)}", style="dim")
    return text


def verdict(report: Report) -> str:
    """The last line."""
    counts = [
        f"{count} {kind}{'s' if count > 1 else ''}"
        for kind in Severity
        if (count := _count(report, kind))
    ]
    state = "a run should work" if report.ok else "a run would fail"
    return f"{state} ({', '.join(counts) or 'nothing found'}; looked for {report.seconds:.1f} s)"


def _count(report: Report, kind: Severity) -> int:
    return sum(finding.severity is kind for finding in report.findings)


def sections(report: Report) -> Iterator[tuple[str, list[Row]]]:
    """Titles, and under each the rows to show."""
    yield "This machine", list(_machine(report))
    yield "Software", list(_software(report))
    yield "World", list(_world(report))
    if report.visit is not None:
        yield "Hosts", [(station.label, host_text(station)) for station in report.visit.stations]
        if report.visit.connections:
            yield "Connections on a fresh port", list(_matrix(report.visit))


def _machine(report: Report) -> Iterator[Row]:
    facts = report.facts
    cores, memory, shm, model = facts.cores, facts.memory, facts.shared_memory, facts.network
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
    own = model.resolves_to
    yield (
        "host name",
        f"{model.hostname} -> {'no answer' if own is None else ', '.join(own) or 'does not resolve'}",
    )
    yield (
        "interfaces",
        "; ".join(
            f"{name} {', '.join(found)}" for name, found in model.interfaces.items() if found
        ),
    )
    yield (
        "open files",
        f"{_count_text(facts.open_files[0])} (may be raised to {_count_text(facts.open_files[1])})",
    )
    for folder in facts.folders:
        yield folder.purpose, folder.path


def _software(report: Report) -> Iterator[Row]:
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


def _program(program: Program) -> str:
    return f"{program.version or program.error} ({program.path})" if program.path else "none"


def _world(report: Report) -> Iterator[Row]:
    world, choice = report.facts.world, report.facts.choice
    if world is None:
        yield "found", "cannot be told, see the problems"
    elif world.launcher == "none":
        yield "found", "no launcher has started us: a world of one"
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
    yield "ranks meet", choice.meeting
    if report.trial is not None:
        yield "trial", _trial(report)


def _trial(report: Report) -> str:
    trial = report.trial
    assert trial is not None
    if trial.error is not None:
        return f"{trial.ranks} ranks failed after {trial.seconds:.1f} s\n{trial.error}".replace(
            "\n", "\n    "
        )
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in trial.phases.items())
    return f"{trial.ranks} ranks met and summed a tensor in {trial.seconds:.1f} s ({phases})"


def host_text(station: Station) -> str:
    """What is known of a host, in one line."""
    if station.here:
        where = "this machine"
    elif station.resolves_to:
        where = station.resolves_to[0]
    else:
        where = (
            "no answer from the name server" if station.resolves_to is None else "known to ssh only"
        )
    if station.error is not None:
        return f"{where}; {station.error}"
    facts = station.facts
    how = "" if station.here else f"ssh and Python answer in {station.seconds:.1f} s; "
    clock = f"clock {station.clock_offset:+.2f} s"
    return (
        f"{where}; {how}{facts['cores']['allowed']} cores, {nbytes(facts['memory']['available'])}"
        f" free; allstep {facts['allstep']}, torch {facts['torch']}, Python {facts['python']};"
        f" {clock}"
    )


def _matrix(visit: Visit) -> Iterator[Row]:
    """One line for each host: whom it reaches, and through which interface."""
    for station in visit.stations:
        row = [connection for connection in visit.connections if connection.source == station.label]
        if row:
            words = [f"{target_label(c)} {'ok' if c.error is None else 'FAILS'}" for c in row]
            through = ", ".join(sorted({c.interface for c in row if c.interface}))
            yield (
                f"from {station.label}",
                ", ".join(words) + (f" (through {through})" if through else ""),
            )


def _count_text(number: int) -> str:
    return "unlimited" if number < 0 else str(number)
