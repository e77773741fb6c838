"""horovodrun's flags: what they export, which are only taken, and what is refused.

Most of it needs no process.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from allstep.cli.horovod import check_build
from allstep.cli.horovod.flags import takes_horovod_flags
from allstep.cli.horovod.flags_table import FLAGS, idle_line, read_config, variables
from allstep.errors import ConfigError
from allstep.hvd import frameworks
from allstep.launch.horovod import FOLDER
from allstep.world import World
from support.allstep_command import Done, run
from support.hosts import Hosts
from support.ranks import clean_environment

HOROVODRUN = FOLDER / "bin" / "horovodrun"
SH = ["sh", "-c"]


def parse(*arguments: str) -> dict[str, Any]:
    """The flags as the command line of `allstep run` reads them."""
    found: dict[str, Any] = {}

    @takes_horovod_flags
    def verb(command: list[str], *, horovod: dict[str, Any]) -> None:
        found.update(horovod)

    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(verb)
    result = CliRunner().invoke(app, [*arguments, "true"])
    assert result.exit_code == 0, result.output
    return found


@pytest.mark.parametrize(
    ("arguments", "exported"),
    [
        ("", {}),
        (
            "--fusion-threshold-mb 10 --cycle-time-ms 20 --cache-capacity 512",
            {"FUSION_THRESHOLD": "10485760", "CYCLE_TIME": "20.0", "CACHE_CAPACITY": "512"},
        ),
        ("--fusion-threshold-mb 0", {"FUSION_THRESHOLD": "0"}),
        (
            "--hierarchical-allreduce --no-hierarchical-allgather --torus-allreduce",
            {"HIERARCHICAL_ALLREDUCE": "1", "HIERARCHICAL_ALLGATHER": "0", "TORUS_ALLREDUCE": "1"},
        ),
        ("--autotune-log-file a.csv --autotune-warmup-samples 1", {}),
        ("--no-autotune --autotune-log-file a.csv", {"AUTOTUNE": "0"}),
        (
            (
                "--autotune --autotune-log-file a.csv --autotune-warmup-samples 1"
                " --autotune-steps-per-sample 5 --autotune-bayes-opt-max-samples 10"
                " --autotune-gaussian-process-noise 0.2"
            ),
            {
                "AUTOTUNE": "1",
                "AUTOTUNE_LOG": "a.csv",
                "AUTOTUNE_WARMUP_SAMPLES": "1",
                "AUTOTUNE_STEPS_PER_SAMPLE": "5",
                "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "10",
                "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.2",
            },
        ),
        ("--timeline-mark-cycles", {}),
        (
            "--timeline-filename t.json --timeline-mark-cycles",
            {"TIMELINE": "t.json", "TIMELINE_MARK_CYCLES": "1"},
        ),
        ("--no-stall-check", {"STALL_CHECK_DISABLE": "1"}),
        (
            (
                "--stall-check --stall-check-warning-time-seconds 10"
                " --stall-check-shutdown-time-seconds 20"
            ),
            {
                "STALL_CHECK_DISABLE": "0",
                "STALL_CHECK_TIME_SECONDS": "10",
                "STALL_SHUTDOWN_TIME_SECONDS": "20",
            },
        ),
        (
            (
                "--mpi-threads-disable --num-nccl-streams 2 --thread-affinity 1"
                " --gloo-timeout-seconds 60"
            ),
            {
                "MPI_THREADS_DISABLE": "1",
                "NUM_NCCL_STREAMS": "2",
                "THREAD_AFFINITY": "1",
                "GLOO_TIMEOUT_SECONDS": "60",
            },
        ),
        ("--log-level INFO --log-without-timestamp", {"LOG_LEVEL": "INFO", "LOG_HIDE_TIME": "1"}),
        ("--log-level debug --log-with-timestamp", {"LOG_LEVEL": "DEBUG", "LOG_HIDE_TIME": "0"}),
        ("--log-hide-timestamp", {"LOG_HIDE_TIME": "1"}),
        ("--start-timeout 7", {"START_TIMEOUT": "7"}),
    ],
)
def test_only_what_was_given_is_exported(arguments: str, exported: dict[str, str]) -> None:
    found = variables(parse(*arguments.split()))
    horovods = {name: value for name, value in found.items() if name.startswith("HOROVOD_")}
    assert horovods == {f"HOROVOD_{name}": value for name, value in exported.items()}


def test_a_flag_wins_over_our_own_variable_of_the_same_meaning() -> None:
    found = variables(parse("--start-timeout", "7", "--gloo-timeout-seconds", "60"))
    assert found["ALLSTEP_START_TIMEOUT"] == "7"
    assert found["ALLSTEP_TIMEOUT"] == "60"
    assert variables(parse("--tcp")) == {"NCCL_IB_DISABLE": "1"}


def test_every_flag_of_horovodrun_is_taken() -> None:
    """The names of the contract, section 5.1; those of `allstep run` itself are tried below."""
    flags = """
        --num-proc 2 --disable-cache --start-timeout 1 --network-interfaces a,b
        --network-interface c --output-filename o --verbose --config-file f -p 22 --ssh-port 22
        -i k --ssh-identity-file k --fusion-threshold-mb 1 --cycle-time-ms 1 --cache-capacity 1
        --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
        --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune
        --no-autotune --autotune-log-file f --autotune-warmup-samples 1
        --autotune-steps-per-sample 1 --autotune-bayes-opt-max-samples 1
        --autotune-gaussian-process-noise 1 --min-np 1 --min-num-proc 1 --max-np 1
        --max-num-proc 1 --slots-per-host 1 --elastic-timeout 1 --reset-limit 1
        --blacklist-cooldown-range 1 2 --timeline-filename f --timeline-mark-cycles
        --no-timeline-mark-cycles --no-stall-check --stall-check
        --stall-check-warning-time-seconds 1 --stall-check-shutdown-time-seconds 1
        --mpi-threads-disable --no-mpi-threads-disable --mpi-args=-x --tcp --binding-args=-y
        --num-nccl-streams 1 --thread-affinity 1 --gloo-timeout-seconds 1 --log-level INFO
        --log-with-timestamp --log-without-timestamp --log-hide-timestamp
        --no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp
        --host-discovery-script s --gloo --mpi --jsrun
    """
    found = parse(*flags.split())
    assert set(found) == {flag.name for flag in FLAGS}
    assert found["network_interfaces"] == ["a,b", "c"]
    assert found["blacklist_cooldown_range"] == (1, 2)


def test_flags_without_effect_are_named_in_one_line() -> None:
    line = idle_line(
        parse(
            "--torus-allreduce",
            "--mpi",
            "--mpi-args=-x",
            "--fusion-threshold-mb",
            "1",
        )
    )
    assert line.startswith("--torus-allreduce (allstep always uses shared memory")
    assert "; --mpi-args (allstep does not use mpirun); --mpi (allstep's own engine" in line
    assert "fusion" not in line
    assert idle_line(parse("--no-torus-allreduce", "--autotune")) == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--fusion-threshold-mb", "-1"],
            "--fusion-threshold-mb -1: the number must be at least 0",
        ),
        (["--cycle-time-ms", "-0.5"], "--cycle-time-ms -0.5"),
        (["--thread-affinity", "-1"], "--thread-affinity -1"),
        (["--autotune-gaussian-process-noise", "1.5"], "1.5: the number must be from 0 to 1"),
        (["--log-level", "DEBGU"], "--log-level DEBGU: did you mean 'DEBUG'?"),
        (["--gloo", "--mpi"], "--gloo and --mpi exclude each other"),
    ],
)
def test_a_wrong_value_is_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        variables(parse(*arguments))


CONFIG = """
controller: GLOO
params:
  {fusion_threshold_mb: 32, cycle_time_ms: 5, cache_capacity: 2048, hierarchical_allreduce: true}
autotune: {enabled: true, log_file: log.csv, gaussian_process_noise: 0.5}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
library_options: {gloo_timeout_seconds: 7, num_nccl_streams: 2}
logging: {level: INFO, with_timestamp: false}
"""
SAME_AS_CONFIG = """
--gloo --fusion-threshold-mb 32 --cycle-time-ms 5 --cache-capacity 2048 --hierarchical-allreduce
--autotune --autotune-log-file log.csv --autotune-gaussian-process-noise 0.5 --timeline-filename
t.json --timeline-mark-cycles --no-stall-check --stall-check-warning-time-seconds 120
--gloo-timeout-seconds 7 --num-nccl-streams 2 --log-level INFO --log-without-timestamp
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def test_a_config_file_gives_the_same_flags(config: Path) -> None:
    values, unknown = read_config(config)
    assert unknown == []
    assert values == parse(*SAME_AS_CONFIG.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("controller: lsf", "controller: 'lsf' is not one of gloo, mpi"),
        ("params: {fusion_threshold_mb: [", "is not YAML: while parsing"),
        ("- a\n- b", "expected sections like `params:`, found list"),
        (
            "params: {fusion_threshold_mb: much}",
            "params.fusion_threshold_mb: 'much' is not of type int",
        ),
        ("params: {cache_capacity: true}", "True is not of type int"),
        (
            "params: {cycle_time_ms: -1}",
            "params.cycle_time_ms: -1.0: the number must be at least 0",
        ),
        ('timeline: {filename: "a\\0b"}', "timeline.*NUL byte"),
        ('autotune: {enabled: true, log_file: "\\0"}', "NUL byte"),
    ],
)
def test_a_wrong_config_file_is_refused(config: Path, text: str, expected: str) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_config(config)


def test_unknown_keys_of_a_config_file_are_named(config: Path) -> None:
    config.write_text("params: {fusion_threshold_mb: 1, fusion_treshold: 2}\nverbose: true\n")
    assert read_config(config) == (
        {"fusion_threshold_mb": 1},
        ["params.fusion_treshold", "verbose"],
    )


# The real thing.


@pytest.mark.usefixtures("processes")
def test_the_workers_see_horovods_variables(config: Path) -> None:
    """Section 6.1 for each worker, the flags, the file below the flags; no process takes them for
    a second launcher."""
    show = (
        "import os, allstep; print({k: v for k, v in os.environ.items() if 'HOROVOD' in k}, '|',"
        " allstep.World.detect())"
    )
    options = ["--config-file", config, "--fusion-threshold-mb", "3", "--verbose"]
    done = run("run", "-np", "2", *options, sys.executable, "-c", show)
    assert done.code == 0, done.err
    for line in done.out.splitlines():
        rank = int(line[1])
        env, world = line[4:].split(" | ")
        found = eval(env)
        assert found["HOROVOD_RANK"] == found["HOROVOD_LOCAL_RANK"] == str(rank)
        assert found["HOROVOD_SIZE"] == found["HOROVOD_LOCAL_SIZE"] == "2"
        assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == ("0", "1")
        assert found["HOROVOD_HOSTNAME"] == "localhost"
        assert found["HOROVOD_CONTROLLER"] == found["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert int(found["HOROVOD_GLOO_RENDEZVOUS_PORT"]) > 1023
        assert found["HOROVOD_GLOO_IFACE"] == "lo"
        assert found["HOROVOD_FUSION_THRESHOLD"] == str(3 << 20)
        assert found["HOROVOD_CYCLE_TIME"] == "5.0"
        assert world == str(World(rank, 2, rank, 2, 0, 1, "localhost", "allstep"))
    assert len(done.out.splitlines()) == 2
    assert "allstep run: localhost:2 will run " in done.err
    assert "HOROVOD_FUSION_THRESHOLD=3145728" in done.err
    assert "allstep run: without effect here: --hierarchical-allreduce" in done.err


def horovodrun(*arguments: str | Path, env: dict[str, str] | None = None) -> Done:
    """bin/horovodrun as a job script calls it: found on the PATH, next to the environment's
    programs."""
    path = os.pathsep.join(
        [str(HOROVODRUN.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    result = subprocess.run(
        ["horovodrun", *map(str, arguments)],
        env={**clean_environment(), "PATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Done(result.returncode, result.stdout, result.stderr, 0.0)


@pytest.mark.usefixtures("processes")
def test_horovodrun_prints_as_horovodrun_does(tmp_path: Path) -> None:
    assert HOROVODRUN.stat().st_mode & stat.S_IXUSR
    command = "echo out $HOROVOD_RANK; echo err $HOROVOD_RANK >&2"
    done = horovodrun(
        "-np", "11", "-H", "localhost:11", "--output-filename", tmp_path / "o", *SH, command
    )
    assert sorted(done.out.splitlines()) == sorted(
        f"[{rank}]<stdout>:out {rank}" for rank in range(11)
    )
    assert sorted(done.err.splitlines()) == sorted(
        f"[{rank}]<stderr>:err {rank}" for rank in range(11)
    )
    assert (tmp_path / "o/rank.03/stdout").read_text() == "out 3\n"
    assert (tmp_path / "o/rank.10/stderr").read_text() == "err 10\n"


@pytest.mark.usefixtures("processes")
def test_lines_can_start_with_the_time() -> None:
    done = horovodrun("-np", "1", "-prefix-timestamp", "echo", "hello")
    assert done.out.endswith("[0]<stdout>:hello\n")
    assert len(done.out.partition("[0]")[0]) == len("Thu Jan  1 00:00:00 1970")


@pytest.mark.usefixtures("processes")
def test_a_module_is_horovodrun_too() -> None:
    env = {**clean_environment(), "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "1", "echo", "hello"]
    assert (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=100).stdout
        == "[0]<stdout>:hello\n"
    )


def test_a_framework_that_is_not_installed_has_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks.Framework, "version", None)
    lines = check_build.table().splitlines()
    for name in ("TensorFlow", "PyTorch", "MXNet"):
        assert f"    [ ] {name}" in lines


@pytest.mark.usefixtures("processes")
def test_version_and_check_build() -> None:
    assert horovodrun("--version").out == "0.28.1\n"
    lines = horovodrun("-cb").out.splitlines()
    assert lines[0] == "Horovod v0.28.1:"
    assert [line for line in lines if line.startswith("Available")] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    for name in ("TensorFlow", "PyTorch", "MXNet"):
        assert f"    [X] {name}" in lines, "all of them are installed for the tests"
    assert lines.count("    [X] Gloo") == 2
    assert lines.count("    [ ] MPI") == 2
    assert len([line for line in lines if line.startswith("    [")]) == 10


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["-np", "2", "--hostfile", "f", "-H", "h:2", "true"],
            "-H and --hostfile both name the hosts",
        ),
        (["-np", "5", "-H", "localhost:4", "true"], "-np 5 asks for more workers than the 4 slots"),
        (
            ["-np", "2", "--cache-capacity", "-1", "true"],
            "--cache-capacity -1: the number must be at least 0",
        ),
        (
            ["-np", "2", "--config-file", "nowhere.yaml", "true"],
            "--config-file nowhere.yaml: No such file",
        ),
        (["-np", "2", "--ssh-port", "70000", "true"], "--ssh-port 70000"),
        (
            ["-np", "2", "--host-discovery-script", "echo why >&2; exit 3", "true"],
            "exit code 3, standard error 'why'",
        ),
        (
            ["--host-discovery-script", "echo localhost", "true"],
            "the number of workers is missing: give -np N",
        ),
        (
            ["-np", "1", "--output-filename", "/dev/null/x", "true"],
            "--output-filename: /dev/null is not a folder",
        ),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], expected: str) -> None:
    done = horovodrun(*arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1, done.err
    assert expected in done.err


@pytest.mark.usefixtures("processes")
def test_discovered_hosts_and_numbers_from_other_flags() -> None:
    script = "echo localhost"
    done = run(
        "run",
        "--host-discovery-script",
        script,
        "--slots-per-host",
        "3",
        "--num-proc",
        "2",
        "echo",
        "hi",
    )
    assert sorted(done.out.splitlines()) == ["[0] hi", "[1] hi"]
    fixed = run("run", "-np", "2", "--max-np", "4", "--reset-limit", "1", "echo", "hi")
    assert sorted(fixed.out.splitlines()) == ["[0] hi", "[1] hi"]
    assert fixed.err == (
        "allstep run: without effect here: --max-np, --reset-limit (an elastic run needs --min-np)\n"
    )


@pytest.fixture
def command_of_ssh(tmp_path: Path) -> Path:
    """An ssh that only notes how it was called."""
    file = tmp_path / "ssh"
    file.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nexit 255\n')
    file.chmod(0o755)
    return file


@pytest.mark.usefixtures("processes")
def test_port_and_key_reach_ssh(command_of_ssh: Path) -> None:
    done = run(
        "run", "-H", "far.invalid:1", "--ssh", command_of_ssh, "-p", "2222", "-i", "my key", "true"
    )
    assert done.code == 2
    assert (command_of_ssh.parent / "called").read_text().startswith("-p 2222 -i my key -T -x")


def test_horovod_on_two_hosts(two_hosts: Hosts) -> None:
    """Horovod's names and variables reach the other host, with the store's address as seen from
    there."""
    show = (
        "import os, socket, horovod; e = os.environ; s ="
        " socket.create_connection((e['HOROVOD_GLOO_RENDEZVOUS_ADDR'],"
        " int(e['HOROVOD_GLOO_RENDEZVOUS_PORT']))); print(e['HOROVOD_HOSTNAME'],"
        " e['HOROVOD_CROSS_RANK'], e['HOROVOD_CROSS_SIZE'], e['HOROVOD_GLOO_IFACE'] != 'lo',"
        " horovod.__version__)"
    )
    done = run(
        "run", "--as-horovodrun", "-H", "h1:1,h2:2", "--ssh", two_hosts.ssh, "python", "-c", show
    )
    assert sorted(done.out.splitlines()) == [
        "[0]<stdout>:h1 0 2 True 0.28.1",
        "[1]<stdout>:h2 1 2 True 0.28.1",
        "[2]<stdout>:h2 0 1 True 0.28.1",
    ], done.err
