"""A real Slurm for tests, from Debian's packages: slurmctld on its first node, a slurmd on each,
and a munged with a key of its own.

Nodes are hosts in the sense of hosts.py (node1, node2, ... with their own network), so several
Slurms and whatever else runs on the machine do not meet. Commands may be run on this machine or on
a node: `slurm.run(["srun", "-n", "2", "hostname"])` runs them on this one, `slurm.run([...], on=0)`
on node1; `slurm.env` is what they need in their environment.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from support.hosts import Hosts, system_path, why_not

CPUS = 4  # per node, whatever the machine has, so that a test may ask for four tasks anywhere

CONFIG = """\
ClusterName=test
SlurmctldHost=node1({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=2
MinJobAge=60
"""


class Slurm(Hosts):
    """A cluster of so many nodes.

    A job that is not over when the cluster closes is killed with it.
    """

    def __init__(self, num_nodes: int) -> None:
        super().__init__([f"node{k + 1}" for k in range(num_nodes)], own_name_is_loopback=False)
        try:
            self._configure()
            self._start()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        config = CONFIG.format(folder=self.folder, addresses=self.addresses)
        for name, address in zip(self.names, self.addresses, strict=True):
            config += f"NodeName={name} NodeAddr={address} CPUs={CPUS} State=UNKNOWN\n"
            (self.folder / f"spool.{name}").mkdir()
        config += (
            f"PartitionName=test Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE"
            " State=UP\n"
        )
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(config)
        # PMIx would meet itself in a /tmp that the nodes share.
        (self.folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.own}\n")
        self.folder.chmod(0o755)  # munged insists that others may reach its socket
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _start(self) -> None:
        environment = {
            "PATH": system_path(),
            "LANG": "C.UTF-8",
            "HOME": os.environ.get("HOME", "/root"),
            **self.env,
        }
        files = [
            f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "log", "pid", "seed")
        ]
        munged = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            *files,
        ]
        self.start(0, *munged, log="munged.log", env=environment)
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self.start(0, "slurmctld", "-D", log="slurmctld.log", env=environment)
        for k, name in enumerate(self.names):
            self.start(k, "slurmd", "-D", "-N", name, log=f"slurmd.{name}.log", env=environment)
        self._until(self.is_idle, "slurmctld", *(f"slurmd.{name}" for name in self.names))

    def is_idle(self) -> bool:
        """Whether no node has a job, or remains of one."""
        states = self.run(["sinfo", "--noheader", "--Node", "--format=%T"], timeout=50)
        return states.stdout.split() == ["idle"] * len(self.names)

    def _until(self, ready: Any, *logs: str, within: float = 60) -> None:
        end = time.monotonic() + within
        while not ready():
            if time.monotonic() > end:
                texts = [f"{log}: {self.supervisor.log(log + '.log')[-2000:]}" for log in logs]
                raise OSError(f"Slurm is not ready after {within} s\n" + "\n".join(texts))
            time.sleep(0.05)

    def run(
        self, command: Sequence[str], *, on: int | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs srun, sbatch, ... and returns what it printed.

        `env` in the options is added to the environment.
        """
        environment = {**_outside_slurm(), **self.env, **options.pop("env", {})}
        options = {"capture_output": True, "text": True, "timeout": 100, **options}
        prefix = [] if on is None else self.prefix(on)
        return subprocess.run([*prefix, *command], env=environment, **options)


def _outside_slurm() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SRUN"))
    }


def _cluster(num_nodes: int) -> Iterator[Slurm]:
    if reason := why_not("slurmctld", "slurmd", "srun", "munged"):
        pytest.skip(reason)
    slurm = Slurm(num_nodes)
    yield slurm
    slurm.close()


@pytest.fixture(scope="session")
def slurm(namespaces: None) -> Iterator[Slurm]:
    """A Slurm of one node, node1."""
    yield from _cluster(1)


@pytest.fixture(scope="session")
def slurm_two_nodes(namespaces: None) -> Iterator[Slurm]:
    """A Slurm of two nodes, node1 and node2, with a network between them."""
    yield from _cluster(2)
