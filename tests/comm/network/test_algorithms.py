"""Algorithms of all-reduce: right for every number of ranks, dtype and size; and their cost
formulas count what they really do.

References: numpy for the results, a simulated network (`support.simulated_network`) for the formulas.
"""

import hashlib
import itertools
import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.comm.network import algorithms
from allstep.comm.network.algorithms import (
    ALGORITHMS,
    Speed,
    choose,
    measure_speed,
    ring,
    wanted_algorithm,
)
from allstep.costs import allreduce
from allstep.errors import CommError, ConfigError
from support.allstep_command import run
from support.hosts import SshHosts
from support.ranks import Ranks
from support.simulated_network import FREE, Run, SimulatedExchange, simulate

OURS = [name for name in ALGORITHMS if name != "native"]
OPS = {
    "add": (torch.add, np.add),
    "mul": (torch.mul, np.multiply),
    "minimum": (torch.minimum, np.minimum),
    "maximum": (torch.maximum, np.maximum),
}
DTYPES = [
    "float32",
    "float64",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "bfloat16",
]
WIRE = Speed(latency=50e-6, bandwidth=125e6, adding=5e9)  # 1 Gbit/s
ONLY = {  # what a formula counts when only one thing costs anything
    "messages": Speed(1.0, math.inf, math.inf),
    "bytes": Speed(0.0, 1.0, math.inf),
    "added": Speed(0.0, math.inf, 1.0),
}


def inputs_of(num_ranks: int, numel: int, dtype: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3, 4, (num_ranks, numel), generator=generator)
    if dtype in ("float32", "float64"):
        whole = torch.randn(num_ranks, numel, generator=generator, dtype=torch.float64)
    return list((whole.abs() if dtype == "uint8" else whole).to(getattr(torch, dtype)))


def expected_of(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Numpy's result.

    Small whole numbers are exact in half precision, so their order does not matter.
    """
    dtype = inputs[0].dtype
    arrays = [(each.float() if dtype is torch.bfloat16 else each).numpy() for each in inputs]
    return torch.from_numpy(OPS[op][1].reduce(np.stack(arrays), axis=0, dtype=arrays[0].dtype)).to(
        dtype
    )


def same_and_right(results: list[torch.Tensor], inputs: list[torch.Tensor], op: str) -> None:
    for other in results[1:]:
        assert torch.equal(results[0].view(torch.uint8), other.view(torch.uint8))  # the very bits
    torch.testing.assert_close(results[0], expected_of(inputs, op), rtol=1e-5, atol=1e-5)


def reduced(
    name: str, inputs: list[torch.Tensor], op: str = "add", speed: Speed = FREE
) -> tuple[list[torch.Tensor], Run]:
    results = [each.clone() for each in inputs]
    done = simulate(
        len(inputs),
        lambda exchange: ALGORITHMS[name].run(
            exchange, results[exchange.rank], exchange.combine(OPS[op][0])
        ),
        speed,
    )
    return results, done


def meaningful(dtype: str, op: str) -> bool:
    return not (dtype == "complex64" and op in ("minimum", "maximum"))


@given(
    name=st.sampled_from(OURS),
    num_ranks=st.integers(1, 8),
    numel=st.one_of(st.integers(0, 20), st.integers(0, 3000)),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(OPS)),
    segment=st.sampled_from([1, 64, 1000, ring.SEGMENT]),
    seed=st.integers(0, 10**6),
)
def test_every_rank_gets_the_result_of_numpy(
    name: str, num_ranks: int, numel: int, dtype: str, op: str, segment: int, seed: int
) -> None:
    if not meaningful(dtype, op):
        return
    inputs = inputs_of(num_ranks, min(numel, 200) if segment == 1 else numel, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SEGMENT", segment)
        results, _ = reduced(name, inputs, op)
    same_and_right(results, inputs, op)


def test_star_adds_in_the_order_of_ranks() -> None:
    inputs = inputs_of(7, 1000, "float32", 1)
    results, _ = reduced("star", inputs)
    in_order = inputs[0].clone()
    for each in inputs[1:]:
        in_order += each
    assert torch.equal(results[3], in_order)


def test_native_needs_a_network_that_can() -> None:
    with pytest.raises(CommError, match="SimulatedExchange has no all-reduce of its own"):
        reduced("native", inputs_of(2, 5, "float32", 0))


@pytest.mark.usefixtures("processes")
def test_the_simulated_network_sees_a_message_that_is_written_over() -> None:
    def careless(exchange: SimulatedExchange) -> None:
        tensor = torch.ones(3)
        if exchange.rank == 0:
            exchange.send(tensor, 1)
            tensor += 1
        else:
            time.sleep(0.1)
            exchange.recv(tensor, 0).wait()

    with pytest.raises(AssertionError, match="written over on its way"):
        simulate(2, careless)


# What it costs


def counted(name: str, num_ranks: int, numel: int) -> Run:
    return reduced(name, [torch.ones(numel) for _ in range(num_ranks)])[1]


@pytest.mark.parametrize("p", range(1, 9))
def test_messages_and_bytes_are_those_of_the_drawings(p: int) -> None:
    numel = 840 * 4  # divisible by every p
    n, q = 4 * numel, 1 << (p.bit_length() - 1)
    extra, rounds = p - q, q.bit_length() - 1
    total = {
        "ring": (2 * p * (p - 1), 2 * (p - 1) * n),
        "tree": (2 * (p - 1), 2 * (p - 1) * n),
        "star": (2 * (p - 1), 2 * (p - 1) * n),
        "butterfly": (2 * q * rounds + 2 * extra, 2 * (q - 1) * n + 2 * extra * n),
    }
    for name in OURS:
        done = counted(name, p, numel)
        assert (done.total("num_sent"), done.total("nbytes_sent")) == total[name], name
        assert (
            done.total("nbytes_added") == (p - 1) * n
        )  # each value is added once, whoever does it
    busiest = {name: counted(name, p, numel) for name in OURS}
    assert busiest["ring"].most("nbytes_sent") == 2 * (p - 1) * n // p
    assert busiest["tree"].most("num_sent") == (p - 1).bit_length()
    assert busiest["star"].most("nbytes_sent") == (p - 1) * n
    assert busiest["butterfly"].most("num_sent") == 2 * rounds + (1 if extra else 0)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("p", range(1, 9))
def test_the_formula_is_what_the_procedure_takes(name: str, p: int) -> None:
    """Each of the three terms alone, and all of them together, on the simulated network."""
    numel = 840 * 64
    for speed in [*ONLY.values(), WIRE, Speed(1e-4, 1e9, 1e8)]:
        inputs = [torch.ones(numel) for _ in range(p)]
        seconds = reduced(name, inputs, speed=speed)[1].seconds
        formula = ALGORITHMS[name].cost(p, 4 * numel, speed)
        if name == "tree" and p & (p - 1):  # some messages of the drawing are missing
            assert 0.6 * formula <= seconds <= formula * 1.0001
        else:
            assert seconds == pytest.approx(formula)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_segments_hide_the_adding_of_the_ring(p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SEGMENT", 4096)
    n = 840 * 64 * 4
    inputs = [torch.ones(n // 4) for _ in range(p)]
    chunk, segment = n / p, 4096 / WIRE.bandwidth
    for adding in (5e9, 130e6):
        speed = Speed(1e-6, WIRE.bandwidth, adding)
        seconds, formula = (
            reduced("ring", inputs, speed=speed)[1].seconds,
            allreduce.ring(p, n, speed, 4096),
        )
        wire = 2 * (p - 1) * (math.ceil(chunk / 4096) * speed.latency + chunk / speed.bandwidth)
        assert seconds == pytest.approx(wire, rel=0.1)  # as if adding cost nothing
        assert seconds <= formula * 1.0001 <= wire + (p - 1) * 2.1 * segment
    slow = Speed(1e-6, WIRE.bandwidth, 60e6)  # adding is what takes the time
    seconds, formula = (
        reduced("ring", inputs, speed=slow)[1].seconds,
        allreduce.ring(p, n, slow, 4096),
    )
    assert 0.9 * formula < seconds <= formula * 1.0001


def test_the_ring_approaches_the_least_possible_and_the_tree_grows_with_the_logarithm() -> None:
    n = 1 << 30
    for p in (2, 3, 16, 100):
        least = 2 * (p - 1) / p * n / WIRE.bandwidth
        assert least < allreduce.ring(p, n, WIRE) < 1.05 * least
    tree = ALGORITHMS["tree"].cost
    for p in (2, 4, 64, 1024):
        assert tree(p, 4, WIRE) == pytest.approx(math.log2(p) * tree(2, 4, WIRE))
    assert tree(5, 4, WIRE) == tree(8, 4, WIRE)


@given(
    name=st.sampled_from(list(ALGORITHMS)),
    p=st.integers(1, 300),
    sizes=st.tuples(st.integers(0, 1 << 31), st.integers(0, 1 << 31)),
    latency=st.floats(0, 1e-2),
    bandwidth=st.floats(1e6, 1e11),
    adding=st.floats(1e8, 1e11),
)
def test_more_bytes_never_cost_less(
    name: str, p: int, sizes: tuple[int, int], latency: float, bandwidth: float, adding: float
) -> None:
    speed, cost = Speed(latency, bandwidth, adding), ALGORITHMS[name].cost
    less, more = sorted(sizes)
    assert 0 <= cost(p, less, speed) <= cost(p, more, speed) * (1 + 1e-9)
    assert cost(1, more, speed) == cost(p, 0, speed) == 0


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 12, 64])
def test_the_choice(p: int) -> None:
    assert choose(p, 4, WIRE).name == "tree"
    assert choose(p, p * 16 << 20, WIRE).name == "ring"
    assert choose(1, 100, WIRE).run is not ALGORITHMS["native"].run
    for nbytes in (0, 1000, 1 << 20, 1 << 25):
        costs = [algorithm.cost(p, nbytes, WIRE) for algorithm in ALGORITHMS.values()]
        assert choose(p, nbytes, WIRE).cost(p, nbytes, WIRE) <= 1.05 * min(costs)


def test_the_butterfly_is_for_what_lies_between() -> None:
    assert choose(8, 100_000, WIRE).name == "butterfly"


def test_the_user_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLSTEP_ALGORITHM", raising=False)
    assert wanted_algorithm() is None
    monkeypatch.setenv("ALLSTEP_ALGORITHM", "tree")
    assert wanted_algorithm() is ALGORITHMS["tree"]
    assert wanted_algorithm("star") is ALGORITHMS["star"]
    assert wanted_algorithm("auto") is None
    monkeypatch.setenv("ALLSTEP_ALGORITHM", "buterfly")
    with pytest.raises(
        ConfigError,
        match=r"ALLSTEP_ALGORITHM='buterfly' is not an algorithm: did you mean 'butterfly'\?",
    ):
        wanted_algorithm()


def test_the_public_names() -> None:
    assert sorted(algorithms.__all__) == algorithms.__all__
    assert all(hasattr(algorithms, name) for name in algorithms.__all__)
    assert all(name == algorithm.name for name, algorithm in ALGORITHMS.items())


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_all_ranks_measure_the_same_speed(p: int) -> None:
    found: list[Speed] = []
    simulate(p, lambda exchange: found.append(measure_speed(exchange)))
    assert len(found) == p
    assert len(set(found)) == 1
    assert found[0].adding > 0
    assert found[0].bandwidth > 0
    assert (found[0].latency > 0) == (p > 1)


# Over Gloo


def check_over_gloo() -> tuple[list[bytes], Speed]:
    """Many operations in a row with nothing between them that would hold a quick rank back, then
    two at once."""
    import torch.distributed as dist

    from support.default_group import joined

    torch.set_num_threads(1)
    ring.SEGMENT = 10_000
    results = []
    with joined() as (rank, size):
        link = algorithms.GlooLink(dist.distributed_c10d._get_default_group().far, rank, size)
        for seed, (name, (dtype, op, numel)) in enumerate(
            itertools.product(ALGORITHMS, cases_of(size))
        ):
            inputs = inputs_of(size, numel, dtype, seed)
            mine = inputs[rank].clone()
            ALGORITHMS[name].run(link.operation(), mine, OPS[op][0])
            torch.testing.assert_close(
                mine, expected_of(inputs, op), rtol=1e-4, atol=1e-4, msg=f"{name} {dtype} {op}"
            )
            results.append(hashlib.sha256(mine.view(torch.uint8).numpy()).digest())
        two_at_once(link, rank)
        return results, measure_speed(link.operation())


def cases_of(size: int) -> list[tuple[str, str, int]]:
    return [
        *[("float32", "add", numel) for numel in (0, 1, size + 1, 50_001)],
        *[
            (dtype, op, 37)
            for dtype, op in zip(DTYPES, itertools.cycle(OPS), strict=False)
            if meaningful(dtype, op)
        ],
    ]


def two_at_once(link: "algorithms.GlooLink", rank: int) -> None:
    """Operations of two threads: which thread is first differs from rank to rank."""
    exchanges = [link.operation(), link.operation()]
    tensors = [torch.full((100_000,), float(rank + 1)), torch.full((100_000,), 100.0 * (rank + 1))]
    threads = [
        threading.Thread(target=ALGORITHMS["ring"].run, args=(exchanges[i], tensors[i], torch.add))
        for i in ((0, 1) if rank % 2 else (1, 0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tensors[0] == sum(range(1, link.size + 1))).all()
    assert (tensors[1] == 100 * sum(range(1, link.size + 1))).all()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_over_gloo(ranks: Ranks, num_ranks: int) -> None:
    first, *others = ranks(num_ranks, check_over_gloo, timeout=150)
    assert all(
        other == first for other in others
    )  # the same bits of every result, and the same speed


ACROSS = """
import json, pathlib, allstep, torch, torch.distributed as dist
from allstep.comm.network.algorithms import ALGORITHMS, GlooLink, measure_speed
world = allstep.init()
torch.set_num_threads(1)
link = GlooLink(dist.distributed_c10d._get_default_group().far, world.rank, world.size)
counter = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
found = {}
for name, algorithm in ALGORITHMS.items():
    flat = torch.arange(1_000_000.0) * (world.rank + 1)
    dist.barrier()
    before = int(counter.read_text())
    algorithm.run(link.operation(), flat, torch.add)
    dist.barrier()  # what the other has received has left
    found[name] = [int(counter.read_text()) - before, torch.equal(flat, torch.arange(1_000_000.0) * 3)]
print(json.dumps([found, measure_speed(link.operation()).bandwidth]))
"""


def test_between_hosts_the_bytes_really_cross(two_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ACROSS)
    where = ["run", "-np", "2", "-H", "h1:1,h2:1", "--ssh", two_hosts.ssh]
    done = run(*where, "python", script, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [json.loads(line.partition("] ")[2]) for line in done.out.splitlines()]
    assert len(lines) == 2
    for found, bandwidth in lines:
        assert list(found) == list(ALGORITHMS)
        for name, (nbytes, right) in found.items():
            assert right, name
            # Each of two ranks sends one tensor's worth, whatever the way; twice would be 8 MB. On
            # top come headers and
            # acknowledgements, 66 bytes for each 1448 and up to as many back (9%), and what a busy
            # machine makes TCP send again.
            assert 4_000_000 < nbytes < 4_000_000 * 1.25, name
        assert bandwidth == lines[0][1] > 0
