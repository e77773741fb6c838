"""The place of this process: one frozen value, read once from the launcher's environment variables.

Terms (Horovod's)::

    rank        number of this process among all                            0 .. size-1
    local_rank  number of this process among those of its host              0 .. local_size-1
    cross_rank  number of its host among the hosts that have a process
                with this local_rank                                        0 .. cross_size-1

    hosts a:1, b:2     rank 0 = a, local 0/1, cross 0/2
                       rank 1 = b, local 0/2, cross 1/2
                       rank 2 = b, local 1/2, cross 0/1

Every launcher passes the place to its processes in environment variables of its own. The table
`LAUNCHERS` lists them, in order of preference. Launchers nest, so the variables of several may be
set; each makes a claim:

* Claims that agree are one. Among them, the first that reports which ranks share a host is taken (a
  plain PMI has only rank and size).
* A claim of a single process contradicts nothing: in `srun -n 1 bash` followed by `mpirun -np 2`,
  Slurm sets 1 process and Open MPI sets 2; the inner launcher counts.
* An outer launcher that starts one task per host (`srun --ntasks-per-node 1 torchrun ...`, the
  daemons that mpirun starts through Slurm) describes those tasks; the inner launcher counts.
* Two launchers that both claim several processes and disagree are an error with the variables.
  `ALLSTEP_LAUNCHER` or `--launcher` resolves it: a name of the table, or `none` for one process.

```
launchers   the table of launchers and their variables
detect      claims, and the choice among them
value       `World`, and the worlds of a list of hosts
identity    names for this host and the running job
```

No other module of allstep reads RANK and similar variables. Imports only `errors`. Start with
`value`.
"""

from allstep.world.detect import tasks_per_node
from allstep.world.identity import job_of, local_variables, node_of
from allstep.world.launcher_variables import LAUNCHERS, NONE, Environment, Launcher
from allstep.world.value import World, places

__all__ = [
    "LAUNCHERS",
    "NONE",
    "Environment",
    "Launcher",
    "World",
    "job_of",
    "local_variables",
    "node_of",
    "places",
    "tasks_per_node",
]
