"""`allstep doctor` as a user runs it: exit status, JSON, and each finding provoked for real where
it can be."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allstep.doctor import Asked, Report, Severity, checks, choice, examine
from allstep.doctor.checks import Facts
from allstep.doctor.finding import Finding
from allstep.doctor.hosts import visit
from allstep.doctor.machine_facts import Network, SharedMemory
from allstep.doctor.print import sections, show
from allstep.doctor.programs import Program
from allstep.doctor.torch_probe import Engine
from allstep.doctor.trial_run import try_run
from allstep.hvd import frameworks
from allstep.launch import Host
from allstep.machine import Memory
from allstep.world import World

PYTHON = sys.executable


def doctor(
    *arguments: str, env: dict[str, str] | None = None, shell: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs it; `shell` goes before it in a shell, such as `ulimit -n 50`."""
    command = [PYTHON, "-m", "allstep", "doctor", *arguments]
    if shell:
        command = ["/bin/sh", "-c", f'{shell} && exec "$@"', "sh", *command]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, **(env or {})}
    )


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def of_kind(report: dict[str, Any], severity: str) -> list[str]:
    return [finding["what"] for finding in report["findings"] if finding["severity"] == severity]


def test_a_host_without_slots_has_threads_all_the_same() -> None:
    assert choice.threads(0) == choice.threads(1) >= 1


@pytest.mark.usefixtures("processes")
def test_a_sound_machine_passes_and_json_holds_everything() -> None:
    done = doctor("--json")
    report = printed(done)
    assert done.returncode == 0 and report["ok"], report["findings"]
    assert report["machine"]["cores"]["affinity"] == len(os.sched_getaffinity(0))
    assert report["machine"]["torch"]["backends"]["gloo"]
    assert report["machine"].keys() >= {
        "memory",
        "shared_memory",
        "network",
        "programs",
        "gpus",
        "packages",
        "frameworks",
        "folders",
    }
    assert report["machine"]["frameworks"] == frameworks.versions()
    assert report["world"]["launcher"] == "none"
    assert report["use"]["workers"] >= 1 and report["use"]["backend"].startswith(
        "allstep: shared memory"
    )
    assert report["trial"]["ranks"] == 2 and report["trial"]["error"] is None
    assert set(report["trial"]["phases"]) == {"import", "init", "allreduce"}
    assert report["hosts"] == report["connections"] == []


@pytest.mark.usefixtures("processes")
def test_many_things_wrong_at_once(tmp_path: Path) -> None:
    """One process for all of them."""
    (tmp_path / "file").touch()
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: not there')")
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "many",
        "ALLSTEP_TIMEOUT": "soon",
        "TMPDIR": str(tmp_path / "nowhere"),
        "ALLSTEP_CACHE": str(tmp_path / "file" / "cache"),
        "GLOO_SOCKET_IFNAME": "eth77",
        "PATH": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "ALLSTEP_TOKEN": "very secret",
    }
    done = doctor("--json", env=env, shell="ulimit -n 300")
    report = printed(done)
    assert done.returncode == 1 and not report["ok"]
    assert report["trial"] is None  # it could only fail, and slowly
    problems, warnings = (
        "\n".join(of_kind(report, "problem")),
        "\n".join(of_kind(report, "warning")),
    )
    assert "torchrun sets RANK=1" in problems and "openmpi sets OMPI_COMM_WORLD_RANK=0" in problems
    assert "ALLSTEP_TIMEOUT='soon'" in problems
    assert "no interface eth77" in problems
    assert "torch cannot be imported: ImportError: libcudart.so.12: not there" in problems
    assert "only 300 files" in warnings
    assert "OMP_NUM_THREADS='many'" in warnings
    assert "TMPDIR=" in warnings and "instead" in warnings
    assert "downloads cannot be written" in warnings
    assert any("no ssh client" in what for what in of_kind(report, "note"))
    assert "very secret" not in done.stdout
    assert all(finding["do"] for finding in report["findings"])


@pytest.mark.usefixtures("processes")
def test_a_torch_that_crashes_does_not_take_the_doctor_with_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    done = doctor("--json", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    (what,) = of_kind(printed(done), "problem")
    assert "torch cannot be imported" in what and "killed by signal 6" in what


@pytest.mark.usefixtures("processes")
def test_a_failed_trial_reports_rank_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sudden = (
        "import os\nif os.environ.get('RANK') == '1': raise SystemExit('rank 1 has had enough')"
    )
    (tmp_path / "sitecustomize.py").write_text(sudden)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trial = try_run()
    assert trial.error is not None and "rank 1 on localhost failed first" in trial.error
    (found,) = trial.findings()
    assert found.severity is Severity.PROBLEM
    assert "a trial of 2 ranks failed" in found.what and "rank 1 has had enough" in found.what


@pytest.mark.usefixtures("processes")
def test_inside_a_world_the_ranks_try_it_together_and_rank_0_reports() -> None:
    command = [PYTHON, "-m", "allstep", "run", "-np", "2", "--", PYTHON, "-m", "allstep", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2, local rank 0 of 2 on localhost, from allstep" in done.stdout
    assert "2 ranks joined and summed a tensor" in done.stdout
    assert all(line.startswith("[0] ") for line in done.stdout.splitlines())


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-H", "h1:x"], "'h1:x' is not HOST or HOST:NUMBER"),
        (["-H", "h1", "--hostfile", "f"], "-H and --hostfile"),
        (["--hostfile", "no-such-file"], "--hostfile no-such-file: No such file"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], complaint: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.usefixtures("processes")
def test_the_command_line_loads_no_torch() -> None:
    check = (
        "import sys, allstep.cli.app, allstep.doctor, allstep.doctor.print, allstep.doctor.probe;"
        " print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([PYTHON, "-c", check], capture_output=True, text=True).stdout.strip()
        == "False"
    )


@pytest.fixture(scope="module")
def report(processes: None) -> Report:
    """Return the report of this machine with fixed facts about torch, which is not imported."""
    engine = Engine(
        "2.13.0+cpu", backends={"gloo": True, "nccl": False, "mpi": False, "ucc": False}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allstep.doctor.report.Look", lambda: SimpleNamespace(result=lambda: engine))
        return examine(Asked(quick=True))


@pytest.fixture
def facts(report: Report) -> Facts:
    return report.facts


def test_on_a_terminal_it_draws_tables(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show(report)
    lines = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(report)
    colored = capsys.readouterr().out
    tables = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert tables != colored and "\x1b" not in tables + lines
    longest = [max(map(len, text.splitlines())) for text in (lines, tables)]
    assert longest[0] > 60 >= longest[1], "a table fits the terminal, plain lines are not wrapped"
    assert "This machine:" in lines and "This machine\n" in tables
    for text in (lines, tables):
        assert "affinity mask" in " ".join(text.split()) and "a run should work" in text


def test_frameworks_have_a_row(report: Report) -> None:
    found = {"PyTorch": "2.13.0", "TensorFlow": "2.21.0", "JAX": None, "MXNet": "1.9.1"}
    facts = replace(report.facts, frameworks=found)
    rows = [dict(rows) for title, rows in sections(replace(report, facts=facts))]
    assert rows[1]["frameworks"] == "TensorFlow 2.21.0, MXNet 1.9.1 (not: JAX)"


def test_names_are_shown_and_not_obeyed(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What programs print about themselves, folders and findings come from outside."""
    found = Finding(Severity.WARNING, "what\x1b[2J[red]", "do\u202e")
    ssh = Program("ssh", "/bin/ssh", "OpenSSH\x1b]0;t\x07")
    facts = replace(report.facts, programs={**report.facts.programs, "ssh": ssh})
    hostile = replace(report, facts=facts, findings=[found])
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        show(hostile)
        text = capsys.readouterr().out
        assert (
            r"what\x1b[2J[red]" in text and r"do\u202e" in text and r"OpenSSH\x1b]0;t\x07" in text
        )
        assert not any(each in text for each in ("\x1b[2J", "\x1b]", "\u202e"))


def severities(facts: Facts, text: str) -> list[Severity]:
    return [finding.severity for finding in checks.find_all(facts) if text in finding.what]


def test_findings_that_need_another_machine(facts: Facts) -> None:
    """The check sees facts that no machine at hand has."""
    engine = facts.torch
    cuda = replace(facts, torch=replace(engine, cuda="12.4", device_error="Found no NVIDIA driver"))
    assert severities(cuda, "Found no NVIDIA driver") == [Severity.WARNING]
    assert severities(replace(facts, gpus=["Big GPU"]), "built without CUDA") == [Severity.WARNING]
    assert severities(replace(facts, torch=replace(engine, version="2.4.1")), "too old") == [
        Severity.PROBLEM
    ]
    assert severities(replace(facts, torch=replace(engine, version="2.99.0")), "too new") == [
        Severity.WARNING
    ]
    assert severities(replace(facts, torch=replace(engine, backends={})), "no Gloo") == [
        Severity.PROBLEM
    ]
    assert severities(
        replace(facts, memory=Memory(1 << 34, 1 << 20, 1 << 30)), "cgroup's limit"
    ) == [Severity.WARNING]
    tiny = SharedMemory(64 << 20, 64 << 20, memfd=True)
    assert severities(replace(facts, shared_memory=tiny), "/dev/shm") == [Severity.NOTE]
    assert severities(replace(facts, shared_memory=replace(tiny, memfd=False)), "/dev/shm") == [
        Severity.WARNING
    ]
    assert severities(replace(facts, open_files=(20, 4096)), "only 20 files") == [Severity.PROBLEM]


def test_the_own_name(facts: Facts) -> None:
    trap = replace(facts, network=Network("me", ["127.0.1.1"], {}))
    assert severities(trap, "own name") == []
    assert severities(replace(trap, num_hosts=2), "resolves to 127.0.1.1") == [Severity.NOTE]
    under_slurm = replace(trap, num_hosts=2, world=World(0, 2, 0, 1, 0, 2, "me", "slurm"))
    assert severities(under_slurm, "resolves to 127.0.1.1") == [Severity.WARNING]
    assert severities(replace(facts, network=Network("me", [], {})), "does not resolve") == [
        Severity.WARNING
    ]
    assert severities(replace(facts, network=Network("me", None, {})), "does not answer") == [
        Severity.WARNING
    ]


def test_the_run_time_folder_counts_where_ranks_meet_by_it(facts: Facts) -> None:
    foreign = replace(facts, torch=replace(facts.torch, runtime_folder_error="is not yours"))
    assert severities(foreign, "is not yours") == [Severity.WARNING]
    under_mpi = replace(foreign, world=World(0, 2, 0, 2, 0, 1, "x", "openmpi"))
    assert severities(under_mpi, "is not yours") == [Severity.PROBLEM]


@pytest.mark.parametrize(
    ("threads", "expect"), [("0", 1), ("-3", 1), ("9999", 1), ("1,2", 0), ("", 0)]
)
def test_threads(facts: Facts, monkeypatch: pytest.MonkeyPatch, threads: str, expect: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    choice = replace(facts.choice, workers=facts.cores.allowed)
    found = severities(
        replace(facts, env={"OMP_NUM_THREADS": threads}, choice=choice), "OMP_NUM_THREADS"
    )
    assert found == [Severity.WARNING] * expect


def test_threads_that_allstep_run_chose_are_no_fault_of_the_users(facts: Facts) -> None:
    choice = replace(facts.choice, workers=facts.cores.allowed)
    env = {"OMP_NUM_THREADS": "9999", "ALLSTEP_THREADS": "9999"}
    assert severities(replace(facts, env=env, choice=choice), "OMP_NUM_THREADS") == []


def test_what_a_run_would_use(facts: Facts) -> None:
    from allstep.doctor.choice import choose

    gpus = replace(
        facts.torch, devices=["cuda:0 x", "cuda:1 x"], backends={"gloo": True, "nccl": True}
    )
    several = choose(World(0, 4, 0, 2, 0, 2, "x", "slurm"), gpus, [])
    assert several.workers == 4 and "nccl" in several.backend and "Slurm step" in several.meeting
    hosts = choose(None, facts.torch, [Host("a", 3), Host("b", 1)])
    assert (hosts.workers, hosts.backend, hosts.command) == (
        4,
        "allstep: shared memory on a host, gloo between hosts",
        "allstep run -H a:3,b:1",
    )


@pytest.mark.usefixtures("processes")
def test_without_ssh_other_hosts_are_out_of_reach(
    facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(facts, programs={**facts.programs, "ssh": Program("ssh", None)})
    assert severities(bare, "no ssh client") == [Severity.NOTE]
    assert severities(replace(bare, needs_ssh=True), "no ssh client") == [Severity.PROBLEM]
    monkeypatch.setenv("PATH", str(tmp_path))
    (state,) = visit([Host("elsewhere.invalid", 2)], "ssh").states
    assert state.error == "cannot start 'ssh' to reach elsewhere.invalid: No such file or directory"
