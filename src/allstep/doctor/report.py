"""Run the whole examination and collect it in a `Report`."""

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep import machine
from allstep._version import __version__
from allstep.console.escape import print_notice
from allstep.doctor import checks, choice, host_checks, machine_facts, packages, programs, trial_run
from allstep.doctor.checks import Facts, environment
from allstep.doctor.finding import Finding, Severity
from allstep.doctor.hosts import Visit, visit
from allstep.doctor.torch_probe import Look
from allstep.doctor.trial_run import Trial
from allstep.errors import WorldError
from allstep.hvd import frameworks
from allstep.launch import Host
from allstep.world import World


@dataclass(frozen=True)
class Report:
    """Result of an examination."""

    facts: Facts
    trial: Trial | None
    """Result of the trial run; None if it was skipped."""
    visit: Visit | None
    """What was found on the hosts; None if no hosts were named."""
    findings: list[Finding]
    """All findings: problems, then warnings, then notes."""
    seconds: float
    """Duration of the examination."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found, so that a run should work."""
        return all(finding.severity is not Severity.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as plain values for JSON."""
        facts = asdict(self.facts)
        return {
            "ok": self.ok,
            "allstep": __version__,
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "machine": {name: facts[name] for name in _MACHINE} | {"environment": facts["env"]},
            "world": facts["world"],
            "world_error": facts["world_error"],
            "use": facts["choice"],
            "trial": asdict(self.trial) if self.trial else None,
            "hosts": list(map(asdict, self.visit.states)) if self.visit else [],
            "connections": list(map(asdict, self.visit.connections)) if self.visit else [],
            "findings": [finding._asdict() for finding in self.findings],
            "seconds": self.seconds,
        }


_MACHINE = (
    "cores",
    "memory",
    "shared_memory",
    "open_files",
    "folders",
    "network",
    "programs",
    "gpus",
    "packages",
    "frameworks",
    "torch",
)


@dataclass(frozen=True)
class Asked:
    """What the user wants to examine."""

    hosts: Sequence[Host] = ()
    """Hosts to examine besides this machine."""
    ssh: str = "ssh"
    """ssh command for other hosts, as in `allstep run --ssh`."""
    iface: str | None = None
    """Network interface between the hosts, as in `allstep run --iface`; None: by route."""
    quick: bool = False
    """Skip the trial run."""
    launcher: str | None = None
    """Launcher to trust for rank and size; None: detect."""


def examine(asked: Asked) -> Report:
    """Examine this machine and the hosts of `asked`, run the trial, and return the report."""
    began = time.monotonic()
    # Importing torch takes longest; everything else happens meanwhile.
    look = Look()
    there = visit(asked.hosts, asked.ssh, asked.iface) if asked.hosts else None
    facts = _gather(asked, look, there)
    findings = checks.find_all(facts)
    if there is not None:
        findings += host_checks.find_all(there, platform.python_version())
    tried = _try(asked, facts, findings)
    findings += tried.findings() if tried else []
    return Report(facts, tried, there, checks.in_order(findings), time.monotonic() - began)


def _try(asked: Asked, facts: Facts, findings: Sequence[Finding]) -> Trial | None:
    """Run the trial, or return None if it is skipped.

    In a world of several ranks it always runs, because the other ranks wait in it. Otherwise it is
    skipped after a problem, which it would only repeat, slowly.
    """
    if asked.quick:
        return None
    if facts.world is not None and facts.world.size > 1:
        return trial_run.join(facts.world.size, asked.launcher)
    if any(finding.severity is Severity.PROBLEM for finding in findings):
        return None
    return trial_run.try_run(asked.hosts, asked.ssh, asked.iface)


def follow(asked: Asked) -> bool:
    """Join the trial of rank 0 and return True; on rank 0, or without a world, return False.

    Only rank 0 prints a report; a rank whose trial fails prints one line with the error.
    """
    world, _ = _detect(asked.launcher)
    if world is None or world.rank == 0:
        return False
    if not asked.quick and (error := trial_run.join(world.size, asked.launcher).error):
        print_notice(f"rank {world.rank} on {world.host}: {error}", "allstep doctor")
    return True


def _gather(asked: Asked, look: Look, there: Visit | None) -> Facts:
    """Collect all facts about this machine and this process."""
    world, world_error = _detect(asked.launcher)
    found = programs.programs()
    engine = look.result()
    others = any(not state.here for state in there.states) if there else False
    return Facts(
        cores=machine_facts.cores(),
        memory=machine.memory(),
        network=machine_facts.network(),
        shared_memory=machine_facts.shared_memory(),
        open_files=machine_facts.open_files(),
        folders=_folders(),
        programs=found,
        gpus=programs.gpus(found),
        packages=packages.packages(),
        frameworks=frameworks.versions(),
        torch=engine,
        world=world,
        world_error=world_error,
        choice=choice.choose(world, engine, asked.hosts),
        num_hosts=len(asked.hosts) or (world.cross_size if world else 1),
        needs_ssh=others and asked.ssh == "ssh",
        env=environment(),
    )


def _detect(launcher: str | None) -> tuple[World | None, str | None]:
    """Return the world and None, or None and the error of its detection."""
    try:
        return World.detect(launcher), None
    except WorldError as error:
        return None, str(error)


def _folders() -> list[machine_facts.Folder]:
    """Return the folders that a run may write to, tested."""
    from allstep.data.cache import cache_folder

    return [
        machine_facts.temporary_folder(),
        machine_facts.folder("downloads", cache_folder()),
        machine_facts.folder("run folders", Path.cwd()),
    ]
