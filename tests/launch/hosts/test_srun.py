"""The nodes of a Slurm allocation, and the srun command that starts an agent."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError, WorldError
from allstep.launch.hosts.host_list import Host
from allstep.launch.hosts.srun import (
    _OPTIONS_OF_JOB,
    allocation,
    check_in_allocation,
    command_on,
    describe_failure,
    expand_nodes,
    forwarded,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-2]", ["node1", "node2"]),
        ("n[08-10,2],login-3", ["n08", "n09", "n10", "n2", "login-3"]),
        ("r[0-1]n[1-2]-ib", ["r0n1-ib", "r0n2-ib", "r1n1-ib", "r1n2-ib"]),
        ("a,b,c", ["a", "b", "c"]),
    ],
)
def test_names_in_slurms_notation(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n[]", "n]1[", "a,,b", "n[1-2", "n[3-x]", "n[0-999999999]", "n[1-2]" * 40]
)
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(WorldError, match="SLURM_JOB_NODELIST="):
        expand_nodes(text)


@given(st.text(alphabet="n1-9,[]0 ", max_size=30))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        names = expand_nodes(text)
    except WorldError:
        return
    assert names and all(names)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def test_hosts_and_slots_come_from_the_allocation() -> None:
    assert allocation(JOB) == [Host("n1", 2), Host("n2", 2), Host("n3", 1)]
    without = {name: value for name, value in JOB.items() if name != "SLURM_TASKS_PER_NODE"}
    assert allocation(without) == [Host("n1", 1), Host("n2", 1), Host("n3", 1)]
    check_in_allocation([Host("n3", 9)], JOB)
    with pytest.raises(ConfigError, match=r"host n4 is not in this allocation \(n\[1-3\]\)"):
        check_in_allocation([Host("n4", 1)], JOB)


def test_tasks_of_another_number_of_nodes() -> None:
    with pytest.raises(WorldError, match="has 3 nodes, but SLURM_TASKS_PER_NODE=2 1"):
        allocation({**JOB, "SLURM_TASKS_PER_NODE": "2"})
    with pytest.raises(WorldError, match="SLURM_TASKS_PER_NODE='x' is not like"):
        allocation({**JOB, "SLURM_TASKS_PER_NODE": "x"})


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_outside_an_allocation(missing: str) -> None:
    with pytest.raises(ConfigError, match="--srun: this is not a Slurm allocation") as raised:
        allocation({**JOB, missing: ""})
    assert "\n" not in str(raised.value)


def test_an_agent_is_a_step_of_its_own() -> None:
    options = "--nodes=1 --ntasks=1 --nodelist=n2 --overlap --no-kill"
    assert command_on("n2", "-V") == ["srun", *options.split(), sys.executable, "-V"]


def test_variables_of_a_step_are_not_sent() -> None:
    env = {"SLURM_PROCID": "0", "CUDA_VISIBLE_DEVICES": "3", "SRUN_DEBUG": "3", "SEED": "1"}
    assert forwarded(env) == {"SEED": "1"}
    assert forwarded({**env, "PATH": "/bin"}, only=["NO"]) == {"PATH": "/bin"}


def test_options_of_the_job_do_not_apply_to_the_step_of_an_agent() -> None:
    applied = ["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_NPROCS"]
    assert all(map(_OPTIONS_OF_JOB.fullmatch, applied))
    kept = ["SLURM_JOB_ID", "SLURM_CONF", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME"]
    assert not any(map(_OPTIONS_OF_JOB.fullmatch, kept))


def test_why_an_agent_did_not_start() -> None:
    err = "srun: error: Unable to create step for job 7: Invalid node\nsrun: Force Terminated\n"
    assert describe_failure("n2", 1, err) == (
        "srun to n2 failed (exit code 1): Unable to create step for job 7: Invalid node. Try `srun"
        " --overlap --nodelist=n2 --ntasks=1 true`"
    )
    err = "python: No module named allstep\nsrun: error: n2: task 0: Exited with exit code 1\n"
    assert "allstep must be installed there" in describe_failure("n2", 1, err)
    assert "it printed nothing" in describe_failure("n2", None, "")
