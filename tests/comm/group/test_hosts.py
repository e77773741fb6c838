"""Collectives over several hosts: the layout, the sum by slice, every algorithm, and that bytes
really cross as few as they should.

`ranks(..., hosts=[...])` tells the ranks that they are on different hosts: they then share memory
only with their neighbours.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.host_map import Layout
from allstep.comm.network.algorithms import ALGORITHMS
from support.allstep_command import run
from support.default_group import joined
from support.hosts import SshHosts
from support.ranks import Ranks

NUMELS = [
    1,
    2,
    7,
    1023,
    16384,
    16385,
    65537,
    200_003,
    1_000_003,
]  # both sides of the small path's limit, and nothing that divides
PLACES = [
    ["a", "b"],
    ["a", "a", "b", "b"],
    ["a", "b", "a", "b"],
    ["a", "a", "a", "b", "b"],
    ["a", "b", "c"],
    ["a", "a", "b", "c", "c"],
]


# The layout


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_layouts_fit_together(nodes: list[str]) -> None:
    layouts = [Layout.of(rank, nodes) for rank in range(len(nodes))]
    assert all(layout.hosts == layouts[0].hosts for layout in layouts)
    assert sorted(rank for ranks in layouts[0].hosts for rank in ranks) == list(range(len(nodes)))
    for layout in layouts:
        assert layout.size == len(nodes)
        assert {nodes[rank] for rank in layout.neighbours} == {nodes[layout.rank]}
        assert layout.neighbours[layout.local_rank] == layout.rank
        if layout.lane:  # one rank of each host, and all of them see the same lane
            assert [nodes[rank] for rank in layout.lane] == list(dict.fromkeys(nodes))
            assert all(layouts[rank].lane == layout.lane for rank in layout.lane)
            assert layout.lane[layout.host] == layout.rank
    several = len(set(nodes)) > 1
    assert layouts[0].num_lanes == (min(map(nodes.count, set(nodes))) if several else 0)
    assert len({layout.lane for layout in layouts if layout.lane}) == layouts[0].num_lanes


@given(st.integers(1, 5000), st.integers(1, 5), st.integers(0, 3))
def test_slices_are_the_same_on_every_host(numel: int, num_slices: int, more_ranks: int) -> None:
    crossing = Crossing(num_slices, None)
    flat = torch.arange(numel)
    slices = crossing.slices(flat, num_slices)
    on_a_larger_host = crossing.slices(flat, num_slices + more_ranks)
    assert torch.equal(torch.cat(slices), flat)
    assert [len(each) for each in on_a_larger_host] == [len(each) for each in slices] + [
        0
    ] * more_ranks


# The sum


def number_of(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * numel + rank))


def sum_up(algorithm: str | None) -> list[str]:
    """Sums of many sizes, private and shared, each held against one process; the bits of all
    results."""
    import allstep.comm

    torch.set_num_threads(1)
    found = []
    with joined() as (rank, size):
        group = dist.new_group(
            backend="allstep", pg_options=allstep.comm.Options(algorithm=algorithm)
        )
        for numel in NUMELS:
            exact = sum(number_of(each, numel).double() for each in range(size))
            for make in (torch.empty, lambda numel: allstep.comm.shared_empty(numel, group=group)):
                tensor = make(numel).copy_(number_of(rank, numel))
                before = group.local.flags.count
                dist.all_reduce(tensor, group=group)
                assert group.local.flags.count > before  # it did not go to Gloo at once
                torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=1e-5)
                found.append(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
        whole = torch.arange(100_000) * (rank + 1)
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)
        assert torch.equal(whole, torch.arange(100_000) * size)
        mean = torch.full((5,), float(rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
        assert torch.allclose(mean, torch.full((5,), (size - 1) / 2))
        works = [
            dist.all_reduce(torch.ones(30_000) * k, group=group, async_op=True) for k in range(5)
        ]
        for k, work in enumerate(works):
            work.wait()
            assert (work.result()[0] == k * size).all()
        dist.barrier(group)
    return found


@pytest.mark.parametrize("places", PLACES, ids="".join)
@pytest.mark.soak(5)
def test_sums_over_hosts(ranks: Ranks, places: list[str]) -> None:
    first, *others = ranks(len(places), sum_up, None, hosts=places, timeout=150)
    assert len(first) == 2 * len(NUMELS)
    assert first[::2] == first[1::2]  # private and shared tensors: the same bits
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_over_uneven_hosts(ranks: Ranks, name: str) -> None:
    first, *others = ranks(5, sum_up, name, hosts=["a", "a", "b", "b", "b"], timeout=150)
    again = ranks(5, sum_up, name, hosts=["a", "a", "b", "b", "b"], timeout=150)
    assert all(other == first for other in [*others, *again])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_on_one_host_for_study(ranks: Ranks, name: str) -> None:
    """Named by argument or by variable, it carries the sum although the ranks could share memory."""
    first, *others = ranks(3, sum_up, name, timeout=150)
    assert all(other == first for other in others)

    def by_variable() -> str:
        with joined():
            local = dist.distributed_c10d._get_default_group().local
            return local.crossing.lane.algorithm_for(100).name

    assert ranks(3, by_variable, env={"ALLSTEP_ALGORITHM": name}) == [name] * 3


def test_a_variable_meant_for_hosts_leaves_groups_of_one_host_alone(ranks: Ranks) -> None:
    def ways() -> list[object]:
        with joined() as (rank, _):
            on_a, on_b = (
                dist.new_group([0, 1], backend="allstep"),
                dist.new_group([2, 3], backend="allstep"),
            )
            own = on_a if rank < 2 else on_b
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=own)
            all_of_us = dist.distributed_c10d._get_default_group()
            return [
                all_of_us.local.crossing.lane.algorithm_for(10).name,
                own.local.crossing,
                tensor.tolist(),
            ]

    found = ranks(4, ways, hosts=["a", "a", "b", "b"], env={"ALLSTEP_ALGORITHM": "star"})
    assert found == [["star", None, [2.0] * 3]] * 4


def test_automatic_choice_is_measured_once_and_the_same_on_all(ranks: Ranks) -> None:
    def choose() -> tuple[object, list[str]]:
        with joined():
            lane = dist.distributed_c10d._get_default_group().local.crossing.lane
            assert lane.speed is None  # nobody pays before the first sum
            dist.all_reduce(torch.ones(10))
            speed = lane.speed
            dist.all_reduce(torch.ones(1_000_000))
            assert lane.speed is speed
            return speed, [lane.algorithm_for(nbytes).name for nbytes in (100, 10_000_000)]

    first, *others = ranks(3, choose, hosts=["a", "b", "c"])
    assert first[0] is not None
    assert others == [first, first]


def test_wrong_algorithms(ranks: Ranks) -> None:
    def different() -> None:
        os.environ["ALLSTEP_ALGORITHM"] = "ring" if os.environ["ALLSTEP_RANK"] == "1" else "tree"
        with joined():
            pass

    for outcome in ranks.outcomes(3, different, hosts=["a", "b", "b"]):
        assert outcome.exit_code
        assert (
            "request different algorithms (tree on ranks 0, 2; ring on ranks 1)" in outcome.output
        )

    def unknown() -> None:
        with joined():
            pass

    outcome = ranks.outcomes(2, unknown, env={"ALLSTEP_ALGORITHM": "rung"})[0]
    assert "ALLSTEP_ALGORITHM='rung' is not an algorithm: did you mean 'ring'?" in outcome.output


def test_a_mismatch_on_one_of_several_hosts(ranks: Ranks) -> None:
    """Also when Gloo would carry the one call and shared memory the other."""

    def call() -> str:
        from allstep.errors import CollectiveMismatch

        with joined() as (rank, size):
            try:
                if rank == 1:
                    dist.all_gather([torch.empty(4) for _ in range(size)], torch.ones(4))
                elif rank == 0:
                    dist.all_reduce(torch.ones(4))
                else:
                    return ""  # host b is not told: nothing of it is under way between hosts
            except CollectiveMismatch as error:
                return str(error)
        return "nothing was noticed"

    def leave_without_barrier() -> str:
        dist.barrier = lambda *_: None
        return call()

    found = ranks(4, leave_without_barrier, hosts=["a", "a", "b", "b"])
    for text in found[:2]:
        assert "rank 0: all_reduce(float32 [4], SUM)" in text
        assert "rank 1: all_gather(float32)" in text


def test_one_host_that_cannot_share_leaves_it_to_gloo(ranks: Ranks) -> None:
    def work() -> bool:
        import allstep.comm.memory.kept
        from allstep.comm.memory.segment import CannotShare

        def refuse(*_: object) -> None:
            raise CannotShare("no memory to share")

        if os.environ["ALLSTEP_HOST"] == "b":
            allstep.comm.memory.kept.share = refuse
        with joined() as (_, size):
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            return dist.distributed_c10d._get_default_group().local is None and bool(
                (tensor == size).all()
            )

    assert ranks(4, work, hosts=["a", "a", "b", "b"]) == [True] * 4


# Real hosts

ACROSS = """
import json, pathlib, allstep, torch, torch.distributed as dist
world = allstep.init()
torch.set_num_threads(1)
counter = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
gloo = dist.new_group(backend="gloo")
found = []
for group in (None, gloo):
    flat = torch.arange(1_000_000.0) * (world.rank + 1)
    dist.all_reduce(torch.ones(1), group=group)  # measures the link
    dist.barrier()
    before = int(counter.read_text())
    dist.all_reduce(flat, group=group)
    dist.barrier()
    found += [int(counter.read_text()) - before, torch.equal(flat, torch.arange(1_000_000.0) * 10)]
if world.local_rank == 0:
    print(json.dumps(found))
"""


def test_a_host_sends_the_bytes_of_one_rank(two_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ACROSS)
    done = run(
        "run", "-np", "4", "-H", "h1:2,h2:2", "--ssh", two_hosts.ssh, "python", script, cwd=tmp_path
    )
    assert done.code == 0, done.err
    lines = [json.loads(line.partition("] ")[2]) for line in done.out.splitlines()]
    assert len(lines) == 2
    for ours, right, flat_gloo, right_too in lines:
        assert right
        assert right_too
        # 2 (p-1)/p n for p = 2 hosts is n; headers and acknowledgements come on top. Flat Gloo over
        # four ranks sends 1.5 n.
        assert 4_000_000 <= ours <= 1.25 * 4_000_000
        assert flat_gloo > 1.2 * ours
