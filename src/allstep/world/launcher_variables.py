"""The environment variables in which each launcher passes rank and size to its processes.

The order of the table is the order of preference among launchers that agree.
"""

from collections.abc import Mapping
from typing import NamedTuple

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The names of a launcher's environment variables; of a tuple, the first that is set counts.

    node: number or name of the host as the launcher sees it. host: name of the host. job: values
    that together identify the running job on this machine. needs: if one of these is not set, the
    other variables have another meaning and do not count.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher
    for launcher in (
        Launcher(
            "allstep",
            rank=("ALLSTEP_RANK",),
            size=("ALLSTEP_SIZE",),
            local_rank=("ALLSTEP_LOCAL_RANK",),
            local_size=("ALLSTEP_LOCAL_SIZE",),
            cross_rank=("ALLSTEP_CROSS_RANK",),
            cross_size=("ALLSTEP_CROSS_SIZE",),
            node=("ALLSTEP_HOST",),
            host=("ALLSTEP_HOST",),
        ),
        Launcher(
            "horovod",
            rank=("HOROVOD_RANK",),
            size=("HOROVOD_SIZE",),
            local_rank=("HOROVOD_LOCAL_RANK",),
            local_size=("HOROVOD_LOCAL_SIZE",),
            cross_rank=("HOROVOD_CROSS_RANK",),
            cross_size=("HOROVOD_CROSS_SIZE",),
            node=("HOROVOD_HOSTNAME",),
            host=("HOROVOD_HOSTNAME",),
            job=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
        ),
        Launcher(
            "torchrun",
            rank=("RANK",),
            size=("WORLD_SIZE",),
            local_rank=("LOCAL_RANK",),
            local_size=("LOCAL_WORLD_SIZE",),
            node=("GROUP_RANK",),
        ),
        Launcher(
            "openmpi",
            rank=("OMPI_COMM_WORLD_RANK",),
            size=("OMPI_COMM_WORLD_SIZE",),
            local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
            local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
            job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        ),
        # MPICH, Intel MPI and MVAPICH: variables of Hydra, or of a plain PMI.
        Launcher(
            "mpich",
            rank=("PMI_RANK", "MV2_COMM_WORLD_RANK"),
            size=("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
            local_rank=("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
            local_size=("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ),
        # A job step. The batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but is one process.
        Launcher(
            "slurm",
            rank=("SLURM_PROCID",),
            size=("SLURM_STEP_NUM_TASKS",),
            local_rank=("SLURM_LOCALID",),
            node=("SLURM_NODEID",),
            host=("SLURMD_NODENAME",),
            job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
            needs=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        ),
        # mpiexec of HPE Cray.
        Launcher(
            "pals",
            rank=("PALS_RANKID",),
            size=("PALS_SIZE", "PMI_SIZE"),
            local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
            local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
            node=("PALS_NODEID",),
            job=("PALS_APID",),
        ),
        # jsrun of IBM.
        Launcher(
            "lsf",
            rank=("JSM_NAMESPACE_RANK",),
            size=("JSM_NAMESPACE_SIZE",),
            local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
            local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
            job=("LSB_JOBID", "PMIX_NAMESPACE"),
        ),
    )
}
NONE = "none"
"""The launcher of a process that no launcher started."""


def first_set(names: tuple[str, ...], env: Environment) -> str | None:
    """Return the first of `names` that is set and not empty in `env`, or None."""
    return next((name for name in names if env.get(name)), None)
