"""Records what real launchers put into the environment of their ranks: the JSON files beside this
one.

    .venv/bin/python tests/environments/record.py            all cases (root, Debian's packages of tools/system-packages; a minute)
    .venv/bin/python tests/environments/record.py slurm      only the cases with this text in their names

A case is one command, run for real on hosts node1 and node2 (tests/hosts.py, tests/slurm.py) from
an environment that holds nothing but PATH, HOME and LANG. Each rank keeps every variable that it
did not have from there, and the name of its host. From the hosts and the launcher's own number the
places in the world follow: they are counted here, not read from the variables that a reader may get
wrong.

```
{"launcher":  who the ranks should say started them: torchrun, openmpi, mpich, slurm, pals, lsf, horovod, none
 "command", "version", "note",
 "recorded":  true; false for a file written by hand after "source", because nobody here has such a machine
 "files":     {variable: text}, where a variable names a file that a reader may open; the test writes it (by hand cases only)
 "ranks":     [the environment of rank 0, of rank 1, ...]
 "expect":    [{"rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "host"} of rank 0, of rank 1, ...]}
```
cross_rank and cross_size count the hosts that have a rank of the same local_rank, as Horovod does.
A process that no launcher made a rank (a batch script) has launcher none and is a world of one.
What is particular to the machine is replaced: addresses, paths.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = Path(sys.prefix).resolve()
sys.path.insert(0, str(HERE.parent))

from support.hosts import Hosts, SshHosts  # noqa: E402
from support.slurm import Slurm  # noqa: E402

BASE = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
NOT_THE_LAUNCHERS = {
    *BASE,
    *(
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "USER",
        "LOGNAME",
        "SHELL",
        "MAIL",
        "TERM",
        "LC_CTYPE",
        "RECORD_TO",
        "SLURM_CONF",
    ),
    *("SSH_CLIENT", "SSH_CONNECTION", "PYENV_SHELL", "PYENV_ROOT", "PYENV_VIRTUALENV_INIT"),
}
TORCHRUN = str(VENV / "bin/torchrun")
PYTHON = str(VENV / "bin/python")


@dataclass(frozen=True)
class Case:
    """`ranks` are the ranks expected; `number` is the variable in which this launcher, and no
    other, counts them."""

    name: str
    launcher: str
    version: str  # the command that prints it
    number: str
    ranks: int
    run: Callable[[], str]  # returns the command as a user would type it
    note: str = ""


def dump(folder: Path) -> None:
    """What a rank runs."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_THE_LAUNCHERS}
    record = {"host": socket.gethostname(), "environment": dict(sorted(kept.items()))}
    part = folder / f"{uuid.uuid4()}.part"
    part.write_text(json.dumps(record))
    part.rename(part.with_suffix(".json"))


def places(hosts: Sequence[str]) -> list[dict[str, int | str]]:
    """The world of each rank, given the host of each rank."""
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [
        {
            "rank": rank,
            "size": len(hosts),
            "local_rank": local[rank],
            "local_size": hosts.count(host),
            "cross_rank": local[:rank].count(local[rank]),
            "cross_size": local.count(local[rank]),
            "host": host,
        }
        for rank, host in enumerate(hosts)
    ]


def neutral(text: str) -> str:
    """The same text on a machine that could be anyone's."""
    text = re.sub(r"198\.18\.\d+\.(\d+)", r"10.0.0.\1", text)
    text = re.sub(r"/tmp/allstep-test-[a-z0-9_]+", "/scratch/slurm", text)
    text = re.sub(r"/tmp/record-[a-z0-9_]+", "/scratch/record", text)
    text = text.replace(str(VENV), "/home/user/venv").replace(str(HERE), "/home/user/job")
    return text.replace(str(HERE.parent.parent), "/home/user").replace("/root", "/home/user")


def record(case: Case, folder: Path) -> None:
    os.environ["RECORD_TO"] = str(folder)
    command = case.run()
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if len(found) != case.ranks:
        raise SystemExit(f"{case.name}: {len(found)} ranks ran, not {case.ranks}")
    if case.ranks > 1 or case.launcher != "none":
        found.sort(key=lambda one: int(one["environment"][case.number]))
        assert [int(one["environment"][case.number]) for one in found] == list(range(case.ranks)), (
            case.name
        )
    said = subprocess.run(
        case.version, shell=True, capture_output=True, text=True, check=True
    ).stdout
    what = {
        "launcher": case.launcher,
        "command": command,
        "version": said.split("\n")[0].strip(),
        "note": case.note,
        "recorded": True,
        "ranks": [one["environment"] for one in found],
        "expect": places([one["host"] for one in found]),
    }
    (HERE / f"{case.name}.json").write_text(neutral(json.dumps(what, indent=1)) + "\n")
    print(f"{case.name}: {case.ranks} ranks", flush=True)


def environment(**more: str) -> dict[str, str]:
    return {**BASE, "RECORD_TO": os.environ["RECORD_TO"], **more}


def ran(command: Sequence[str], prefix: Sequence[str], **env: str) -> None:
    done = subprocess.run(
        [*prefix, *command],
        env=environment(**env),
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}")


def shown(command: Sequence[str]) -> str:
    """The command as a user would type it."""
    text = (
        shlex.join(command)
        .replace(shlex.join(RANK), "python train.py")
        .replace(TORCHRUN, "torchrun")
    )
    return text.replace(shlex.join(SCRIPT), "train.py").replace("-x RECORD_TO ", "")


RANK = [PYTHON, str(HERE / "record.py"), "--dump"]
SCRIPT = [str(HERE / "record.py"), "--dump"]  # for torchrun, which calls the interpreter itself


def on_one(hosts: Hosts, *command: str, **env: str) -> Callable[[], str]:
    """Runs a command on node1."""

    def run() -> str:
        ran(command, hosts.prefix(0), **env)
        return shown(command)

    return run


def on_each(hosts: Hosts, *command: str) -> Callable[[], str]:
    """Runs a command on every host at once; {k} in it is the number of the host."""

    def run() -> str:
        lines = [[word.replace("{k}", str(k)) for word in command] for k in range(len(hosts.names))]
        started = [
            subprocess.Popen([*hosts.prefix(k), *line], env=environment(), cwd=HERE)
            for k, line in enumerate(lines)
        ]
        codes = [process.wait(120) for process in started]
        if any(codes):
            raise SystemExit(f"{shlex.join(command)} failed")
        return " & ".join(f"[node{k + 1}] {shown(line)}" for k, line in enumerate(lines))

    return run


def in_batch(slurm: Slurm, options: str, script: str) -> Callable[[], str]:
    """Submits a batch script and waits for it."""

    def run() -> str:
        text = script.format(rank=shlex.join(RANK))
        command = ["sbatch", "--wait", "-o", f"{os.environ['RECORD_TO']}/log", *options.split()]
        done = subprocess.run(
            [*slurm.prefix(0), *command],
            input=f"#!/bin/bash\n{text}\n",
            env=environment(**slurm.env),
            cwd=HERE,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise SystemExit(f"{text}: {done.returncode}\n{Path(command[3]).read_text()}")
        return f"sbatch {options} <<< {shlex.quote(shown([text])[1:-1])}"

    return run


OPENMPI = "mpirun --version"
MPICH = "mpiexec.hydra -version | grep Version: | sed s/Version:/MPICH/ | tr -s ' '"
SLURM = "slurmd -V"
TORCH = f"{PYTHON} -c 'import torch; print(torch.__version__)'"
ROOT = ["--allow-run-as-root"]


def plain_cases(hosts: SshHosts) -> list[Case]:
    """Launchers with no batch system around them."""
    ssh = hosts.folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {hosts.ssh} "$@"\n')
    ssh.chmod(0o755)
    mpirun = ["mpirun.openmpi", *ROOT, "--oversubscribe"]
    over_ssh = ["-mca", "plm_rsh_agent", hosts.ssh, "-x", "RECORD_TO"]
    hydra = ["mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", str(ssh)]
    join = ["--nnodes", "2", "--nproc-per-node", "2"]
    first = hosts.addresses[0]
    static = [*join, "--node-rank", "{k}", "--master-addr", first, "--master-port", "29500"]
    return [
        Case("none", "none", "echo", "", 1, on_one(hosts, *RANK), "no launcher at all"),
        Case(
            "torchrun",
            "torchrun",
            TORCH,
            "RANK",
            2,
            on_one(hosts, TORCHRUN, "--nproc-per-node", "2", *SCRIPT),
        ),
        Case(
            "torchrun-two-nodes",
            "torchrun",
            TORCH,
            "RANK",
            4,
            on_each(hosts, TORCHRUN, *static, *SCRIPT),
        ),
        Case(
            "torchrun-c10d-two-nodes",
            "torchrun",
            TORCH,
            "RANK",
            4,
            on_each(
                hosts,
                TORCHRUN,
                *join,
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "node1:29501",
                *SCRIPT,
            ),
            "node ranks are given in the order of arrival; MASTER_ADDR is the name of the host that"
            " came first",
        ),
        Case(
            "openmpi",
            "openmpi",
            OPENMPI,
            "OMPI_COMM_WORLD_RANK",
            2,
            on_one(hosts, *mpirun, "-np", "2", *RANK),
        ),
        Case(
            "openmpi-one",
            "openmpi",
            OPENMPI,
            "OMPI_COMM_WORLD_RANK",
            1,
            on_one(hosts, *mpirun, "-np", "1", *RANK),
        ),
        Case(
            "openmpi-two-nodes",
            "openmpi",
            OPENMPI,
            "OMPI_COMM_WORLD_RANK",
            3,
            on_one(hosts, *mpirun, *over_ssh, "-np", "3", "-H", "node1:2,node2:1", *RANK),
            "OMPI_MCA_orte_num_nodes counts the hosts, nothing numbers them and nothing says who"
            " sits where: with 2 + 1 ranks a rank can tell its cross_size only by asking the"
            " others",
        ),
        Case(
            "mpich",
            "mpich",
            MPICH,
            "PMI_RANK",
            2,
            on_one(hosts, "mpiexec.hydra", "-np", "2", *RANK),
        ),
        Case(
            "mpich-two-nodes",
            "mpich",
            MPICH,
            "PMI_RANK",
            3,
            on_one(hosts, *hydra, "-np", "3", "-hosts", "node1:2,node2:1", *RANK),
            "nothing counts or numbers the hosts",
        ),
    ]


def slurm_cases(slurm: Slurm) -> list[Case]:
    """Slurm on one node of a cluster, and launchers inside it."""
    mpirun = " ".join(["mpirun.openmpi", *ROOT])
    torchrun = [TORCHRUN, "--nproc-per-node", "2", *SCRIPT]
    conf = slurm.env

    def srun(*arguments: str) -> Callable[[], str]:
        return on_one(slurm, "srun", *arguments, **conf)

    return [
        Case("slurm", "slurm", SLURM, "SLURM_PROCID", 2, srun("-n", "2", *RANK)),
        Case("slurm-one", "slurm", SLURM, "SLURM_PROCID", 1, srun("-n", "1", *RANK)),
        Case("slurm-pmi2", "slurm", SLURM, "SLURM_PROCID", 2, srun("--mpi=pmi2", "-n", "2", *RANK)),
        Case("slurm-pmix", "slurm", SLURM, "SLURM_PROCID", 2, srun("--mpi=pmix", "-n", "2", *RANK)),
        Case(
            "slurm-batch-script",
            "none",
            SLURM,
            "",
            1,
            in_batch(slurm, "-n 2", "{rank}"),
            "the script itself is one process, whatever SLURM_NTASKS says; SLURM_STEP_ID is what it"
            " lacks",
        ),
        Case(
            "slurm-batch-script-two-nodes",
            "none",
            SLURM,
            "",
            1,
            in_batch(slurm, "-N 2 -n 4", "{rank}"),
        ),
        Case(
            "slurm-salloc-shell",
            "none",
            SLURM,
            "",
            1,
            on_one(slurm, "salloc", "-n", "2", *RANK, **conf),
            "what salloc starts where it was called: no SLURM_PROCID at all",
        ),
        Case(
            "slurm-in-batch",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            2,
            in_batch(slurm, "-n 4", "srun -n 2 {rank}"),
            "a step smaller than its job",
        ),
        Case(
            "torchrun-in-slurm",
            "torchrun",
            TORCH,
            "RANK",
            2,
            srun("-n", "1", *torchrun),
            "one torchrun per node is torch's recipe for Slurm",
        ),
        Case(
            "torchrun-in-batch",
            "torchrun",
            TORCH,
            "RANK",
            2,
            in_batch(slurm, "-n 2", shlex.join(torchrun)),
        ),
        Case(
            "openmpi-in-slurm",
            "openmpi",
            OPENMPI,
            "OMPI_COMM_WORLD_RANK",
            2,
            srun("-n", "1", "sh", "-c", f"{mpirun} --oversubscribe -np 2 {shlex.join(RANK)}"),
            "mpirun in the shell of a step of one task",
        ),
        Case(
            "openmpi-in-batch",
            "openmpi",
            OPENMPI,
            "OMPI_COMM_WORLD_RANK",
            2,
            in_batch(slurm, "-n 2", f"{mpirun} -np 2 {{rank}}"),
        ),
        Case(
            "mpich-in-batch",
            "mpich",
            MPICH,
            "PMI_RANK",
            2,
            in_batch(slurm, "-n 2", "mpiexec.hydra -np 2 {rank}"),
        ),
    ]


def two_node_cases(slurm: Slurm) -> list[Case]:
    """Slurm over two nodes, and launchers inside it."""
    mpirun = " ".join(["mpirun.openmpi", *ROOT])
    across = [
        TORCHRUN,
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
    ]

    def srun(*arguments: str) -> Callable[[], str]:
        return on_one(slurm, "srun", *arguments, **slurm.env)

    return [
        Case(
            "slurm-two-nodes",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            4,
            srun("-N", "2", "-n", "4", "--ntasks-per-node", "2", *RANK),
        ),
        Case(
            "slurm-two-nodes-uneven",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            4,
            srun("-N", "2", "-n", "4", *RANK),
            "Slurm fills the first node and leaves one task to the second",
        ),
        Case(
            "slurm-two-nodes-cyclic",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            4,
            srun("-N", "2", "-n", "4", "--ntasks-per-node", "2", "-m", "cyclic", *RANK),
            "ranks of one node are not neighbours",
        ),
        Case(
            "slurm-two-nodes-pmi2",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            4,
            srun("--mpi=pmi2", "-N", "2", "-n", "4", "--ntasks-per-node", "2", *RANK),
            "PMI_RANK and PMI_SIZE say nothing of hosts; only Slurm's variables do",
        ),
        Case(
            "slurm-two-nodes-pmix",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            4,
            srun("--mpi=pmix", "-N", "2", "-n", "4", "--ntasks-per-node", "2", *RANK),
        ),
        Case(
            "slurm-in-batch-two-nodes",
            "slurm",
            SLURM,
            "SLURM_PROCID",
            2,
            in_batch(slurm, "-N 2 -n 4", "srun -N 1 -n 2 {rank}"),
            "a step on one of the job's two nodes",
        ),
        Case(
            "torchrun-in-slurm-two-nodes",
            "torchrun",
            TORCH,
            "RANK",
            4,
            srun("-N", "2", "-n", "2", "--ntasks-per-node", "1", *across, "node1:29502", *SCRIPT),
            "two launchers, both of more than one rank: the inner one counts",
        ),
        Case(
            "openmpi-in-slurm-two-nodes",
            "openmpi",
            OPENMPI,
            "OMPI_COMM_WORLD_RANK",
            4,
            in_batch(slurm, "-N 2 --ntasks-per-node 2", f"{mpirun} -np 4 {{rank}}"),
            "node1: children of mpirun, with the batch script's variables (4 tasks); node2:"
            " children of orted, which is a Slurm step of its own, of one task on one node",
        ),
        Case(
            "mpich-in-slurm-two-nodes",
            "mpich",
            MPICH,
            "PMI_RANK",
            4,
            in_batch(slurm, "-N 2 --ntasks-per-node 2", "mpiexec.hydra -np 4 {rank}"),
            "hydra starts one proxy per node with srun, and the ranks see a mixture of that step"
            " and of the batch script: SLURM_NTASKS is 4, SLURM_STEP_NUM_TASKS 2, and on node2"
            " SLURMD_NODENAME and HOSTNAME still say node1",
        ),
    ]


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for make, cases in (
        (lambda: SshHosts(["node1", "node2"], own_name_is_loopback=False), plain_cases),
        (lambda: Slurm(2), lambda slurm: slurm_cases(slurm) + two_node_cases(slurm)),
    ):
        hosts = make()
        try:
            for case in cases(hosts):
                if wanted in case.name:
                    with tempfile.TemporaryDirectory(prefix="record-", dir="/tmp") as folder:
                        record(case, Path(folder))
        finally:
            hosts.close()


if __name__ == "__main__":
    if "--dump" in sys.argv:
        dump(Path(os.environ["RECORD_TO"]))
    else:
        main()
