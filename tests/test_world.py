"""World.detect against the environments that real launchers gave their processes, and against
contradictions."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.comm.group.joined import exact
from allstep.errors import WorldError
from allstep.world import LAUNCHERS, World, node_of, places, tasks_per_node

CASES = sorted((Path(__file__).parent / "environments").glob("*.json"))


def load(path: Path, tmp_path: Path) -> dict[str, Any]:
    """A recorded case; files that its variables name are written out."""
    case = json.loads(path.read_text())
    for variable, content in case.get("files", {}).items():
        (tmp_path / variable).write_text(content)
        for env in case["ranks"]:
            env[variable] = str(tmp_path / variable)
    return case


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_recorded_environment(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load(path, tmp_path)
    worlds, cards = [], []
    for env, expect in zip(case["ranks"], case["expect"], strict=True):
        monkeypatch.setattr("socket.gethostname", lambda name=expect["host"]: name)
        world = World.detect(env=env)
        assert world.launcher == case["launcher"]
        for name in ("rank", "size", "local_rank", "local_size", "host"):
            assert getattr(world, name) == expect[name], name
        worlds.append(world)
        cards.append(
            {"node": node_of(world, env), "host": world.host, "local_rank": world.local_rank}
        )
    # What one process cannot know from its own variables it learns from the cards of all.
    for world, expect, env in zip(worlds, case["expect"], case["ranks"], strict=True):
        if len(cards) == world.size:
            found = exact(world, cards, env)
            assert (found.cross_rank, found.cross_size) == (
                expect["cross_rank"],
                expect["cross_size"],
            )
            assert (found.local_rank, found.local_size) == (
                expect["local_rank"],
                expect["local_size"],
            )


def test_real_records_are_among_the_cases() -> None:
    recorded = {
        json.loads(path.read_text())["launcher"]
        for path in CASES
        if json.loads(path.read_text())["recorded"]
    }
    assert {"torchrun", "openmpi", "mpich", "slurm", "none"} <= recorded


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_to_env_and_detect_are_inverse(hosts: list[str]) -> None:
    for world in places(hosts):
        assert World.detect(env=world.to_env()) == world


def test_the_generation_is_in_the_environment_from_the_second_world_on() -> None:
    for world in (World.alone(), *places(["a", "b"])):
        assert world.generation == 0
        assert "ALLSTEP_GENERATION" not in world.to_env()
    for world in places(["a", "b"], generation=3):
        assert world.to_env()["ALLSTEP_GENERATION"] == "3"
        assert World.detect(env=world.to_env()) == world
    # That of another launcher above it is not ours.
    other = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "ALLSTEP_GENERATION": "3"}
    assert World.detect("torchrun", env=other).generation == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_places_follow_horovods_definitions(hosts: list[str]) -> None:
    worlds = places(hosts)
    for world in worlds:
        same_host = [other.rank for other in worlds if other.host == world.host]
        same_local = {other.host for other in worlds if other.local_rank == world.local_rank}
        assert world.local_size == len(same_host)
        assert world.local_rank == same_host.index(world.rank)
        assert world.cross_size == len(same_local)
        assert 0 <= world.cross_rank < world.cross_size
        assert world.size == len(hosts)
    crosses = {(world.local_rank, world.cross_rank) for world in worlds}
    assert len(crosses) == len(worlds)


def error(env: dict[str, str], launcher: str | None = None) -> str:
    with pytest.raises(WorldError) as caught:
        World.detect(launcher, env=env)
    return str(caught.value)


def test_rank_not_below_size_names_the_variables() -> None:
    text = error({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"})
    assert "OMPI_COMM_WORLD_RANK=2" in text
    assert "OMPI_COMM_WORLD_SIZE=2" in text


def test_a_rank_without_a_size_is_an_error() -> None:
    assert "WORLD_SIZE" in error({"RANK": "1"})
    assert "PMIX_RANK=1" in error({"PMIX_RANK": "1"})


def test_a_number_that_is_none() -> None:
    assert "RANK='one'" in error({"RANK": "one", "WORLD_SIZE": "2"})


def test_local_numbers_that_contradict() -> None:
    text = error({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"})
    assert "LOCAL_WORLD_SIZE=4" in text
    assert "WORLD_SIZE=2" in text


MPI_OF_TWO = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HOROVOD_OF_FOUR = {
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "4",
}


def test_two_launchers_that_disagree_are_both_named() -> None:
    text = error({**MPI_OF_TWO, **HOROVOD_OF_FOUR})
    for part in (
        "HOROVOD_RANK=0",
        "HOROVOD_SIZE=4",
        "OMPI_COMM_WORLD_RANK=1",
        "OMPI_COMM_WORLD_SIZE=2",
        "ALLSTEP_LAUNCHER",
    ):
        assert part in text


def test_the_user_decides_between_them() -> None:
    both = {**MPI_OF_TWO, **HOROVOD_OF_FOUR}
    assert World.detect("openmpi", env=both).size == 2
    assert World.detect(env={**both, "ALLSTEP_LAUNCHER": "horovod"}).size == 4
    assert World.detect("openmpi", env={**both, "ALLSTEP_LAUNCHER": "horovod"}).size == 2
    assert World.detect("none", env=both) == World.alone()


def test_a_launcher_that_is_not_there() -> None:
    assert "SLURM_PROCID is not set" in error(MPI_OF_TWO, "slurm")
    assert "did you mean 'slurm'" in error({}, "slrum")


def test_our_launcher_inside_a_single_task_of_another() -> None:
    step_of_one = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_LOCALID": "0",
    }
    ours = places(["a", "a"])[1]
    assert World.detect(env={**step_of_one, **ours.to_env()}) == ours


def test_the_order_of_belief() -> None:
    assert list(LAUNCHERS) == [
        "allstep",
        "horovod",
        "torchrun",
        "openmpi",
        "mpich",
        "slurm",
        "pals",
        "lsf",
    ]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_slurms_counts(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in runs)
    assert tasks_per_node(text) == [tasks for tasks, times in runs for _ in range(times)]


def test_slurms_counts_that_are_not() -> None:
    for text in ("2x3", "1(x999999999)", "1(x1000000),1(x1000000)", "9" * 5000, "\u0663"):
        with pytest.raises(WorldError, match=r"is not like|has more than") as caught:
            tasks_per_node(text)
        assert len(str(caught.value)) < 300
