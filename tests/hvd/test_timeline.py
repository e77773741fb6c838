"""Horovod's timeline, event by event: every kind of operation, fused and refused, gradients; files
that stay whole whatever happens."""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep.torch as hvd
from allstep.hvd import timeline
from allstep.world import World
from support.hvd_ranks import running
from support.ranks import Ranks, wait_until

DYNAMIC = {"HOROVOD_TIMELINE": "DYNAMIC"}


@dataclass
class Bar:
    """From a B to its E, with the bars and the ticks in between. end:

    None when the file ends before.
    """

    name: str
    start: int
    end: int | None = None
    args: dict[str, str] | None = None
    bars: list["Bar"] = field(default_factory=list)
    ticks: list[tuple[str, int]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [bar.name for bar in self.bars]


def read(path: Path | str, whole: bool = True) -> dict[str, list[Bar]]:
    """The bars of each tensor, checked against the rules of the format. whole: every bar must have
    ended."""
    events = json.loads(Path(path).read_text())
    first, second, *events = events
    assert list(first["args"]) == ["start_time_since_epoch_in_micros"]
    assert abs(first["args"]["start_time_since_epoch_in_micros"] / 1e6 - time.time()) < 600
    assert {**first, "args": None} == {"name": "process_name", "ph": "M", "pid": 0, "args": None}
    assert second == {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}}
    rows: list[tuple[str, list[Bar]]] = []
    stacks: dict[int, list[Bar]] = {}
    latest: dict[int, int] = {}
    for event in events:
        if event["ph"] == "M":
            introduce(event, rows)
        elif event["ph"] == "i":
            assert event == {"ph": "i", "name": "CYCLE_START", "ts": event["ts"], "s": "g"}
        else:
            pid, now = event["pid"], event["ts"]
            assert type(now) is int
            assert now >= latest.get(pid, 0)
            latest[pid] = now
            follow(event, rows[pid - 1][1], stacks.setdefault(pid, []))
    if whole:
        assert not any(stacks.values()), "bars that do not end"
    names = [name for name, _ in rows]
    assert len(set(names)) == len(names)
    return dict(rows)


def introduce(event: dict[str, Any], rows: list[tuple[str, list[Bar]]]) -> None:
    """A tensor has a name, then a place, before anything else; they are numbered from 1."""
    if event["name"] == "process_name":
        rows.append((event["args"]["name"], []))
        assert event == {
            "name": "process_name",
            "ph": "M",
            "pid": len(rows),
            "args": {"name": rows[-1][0]},
        }
    else:
        place = {"sort_index": len(rows)}
        assert event == {"name": "process_sort_index", "ph": "M", "pid": len(rows), "args": place}


def follow(event: dict[str, Any], row: list[Bar], stack: list[Bar]) -> None:
    match event["ph"]:
        case "B":
            assert set(event) == {"ph", "name", "ts", "pid"}
            bar = Bar(event["name"], event["ts"])
            (stack[-1].bars if stack else row).append(bar)
            stack.append(bar)
        case "E":
            assert set(event) in ({"ph", "ts", "pid"}, {"ph", "ts", "pid", "args"})
            stack[-1].end, stack[-1].args = event["ts"], event.get("args")
            stack.pop()
        case "X":
            assert set(event) == {"ph", "name", "ts", "dur", "pid"}
            assert event["dur"] == 0
            assert stack[-1].name.startswith("NEGOTIATE_"), "ranks come while it is negotiated"
            stack[-1].ticks.append((event["name"], event["ts"]))
        case phase:
            pytest.fail(f"an event of phase {phase}")


def assert_done(
    row: list[Bar],
    op: str,
    activities: list[str],
    dtype: str,
    shape: str,
    ticks: tuple[str, ...] = ("0", "1"),
) -> None:
    """The row of a tensor that was negotiated and carried out once."""
    negotiation, operation = row
    assert (negotiation.name, negotiation.bars, negotiation.args) == (f"NEGOTIATE_{op}", [], None)
    assert sorted(name for name, _ in negotiation.ticks) == list(ticks)
    assert (operation.name, operation.names, operation.ticks) == (op, activities, [])
    assert operation.args == {"dtype": dtype, "shape": shape}
    assert negotiation.end is not None and negotiation.end <= operation.start
    assert operation.bars[0].start == operation.start
    assert operation.bars[-1].end == operation.end
    for before, after in pairwise(operation.bars):
        assert before.end == after.start, "one activity after the other, without a gap"


# What it shows


def every_kind() -> None:
    alone = hvd.ProcessSet([1])
    with running(process_sets=[alone]) as (rank, _):
        # rank 0 listens when it is through with init; the other may have come to the first
        # operation before
        hvd.barrier()
        hvd.allreduce(torch.ones(2, 3), name="x")
        hvd.allgather(torch.ones(rank + 1, 2, dtype=torch.int64), name="x")
        hvd.broadcast(torch.tensor(2.0, dtype=torch.float64), 1, name="x")
        hvd.alltoall(torch.arange(6), splits=torch.tensor([2, 4], dtype=torch.int32), name="x")
        hvd.reducescatter(torch.ones(3, 2, dtype=torch.float16), op=hvd.Sum, name="x")
        hvd.allreduce(torch.ones(5), op=hvd.Adasum, name='"odd"\n')
        hvd.grouped_allreduce([torch.ones(each) for each in (1, 2, 3)], name="small")
        hvd.allreduce(torch.empty(0, 4), name="empty")
        hvd.barrier()
        if rank == 1:
            hvd.allreduce(torch.ones(1), name="of one rank", process_set=alone)
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
            hvd.allreduce(torch.ones(1 + rank), name="different")
        if rank == 0:
            hvd.allreduce(torch.ones(7), name="the other has joined")
        hvd.join()


FUSED = ["QUEUE", "MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_every_kind_of_operation(ranks: Ranks, tmp_path: Path, hosts: list[str]) -> None:
    ranks(2, every_kind, hosts=hosts, env={"HOROVOD_TIMELINE": str(tmp_path / "trace.json")})
    rows = read(tmp_path / "trace.json")
    assert_done(
        rows.pop("allreduce.x"), "ALLREDUCE", ["QUEUE", "GLOO_ALLREDUCE"], "float32", "[2, 3]"
    )
    assert_done(
        rows.pop("allgather.x"), "ALLGATHER", ["QUEUE", "GLOO_ALLGATHER"], "int64", "[3, 2]"
    )
    assert_done(rows.pop("broadcast.x"), "BROADCAST", ["QUEUE", "GLOO_BCAST"], "float64", "[]")
    assert_done(rows.pop("alltoall.x"), "ALLTOALL", ["QUEUE", "MPI_ALLTOALL"], "int64", "[4]")
    assert_done(
        rows.pop("reducescatter.x"),
        "REDUCESCATTER",
        ["QUEUE", "GLOO_REDUCESCATTER"],
        "float16",
        "[2, 2]",
    )
    assert_done(
        rows.pop('allreduce."odd"\n'), "ADASUM", ["QUEUE", "MPI_ADASUM_ALLREDUCE"], "float32", "[5]"
    )
    for number in (1, 2, 3):
        assert_done(
            rows.pop(f"grouped_allreduce.small_{number}of3"),
            "ALLREDUCE",
            FUSED,
            "float32",
            f"[{number}]",
        )
    assert_done(
        rows.pop("allreduce.empty"), "ALLREDUCE", ["QUEUE", "GLOO_ALLREDUCE"], "float32", "[0, 4]"
    )
    joined = rows.pop("allreduce.the other has joined")
    assert_done(joined, "ALLREDUCE", ["QUEUE", "GLOO_ALLREDUCE"], "float32", "[7]", ticks=("0",))

    barriers = rows.pop("barrier.noname")
    assert [bar.name for bar in barriers] == ["NEGOTIATE_BARRIER"] * 3, (
        "in the beginning, in the middle, in the end"
    )
    assert all(sorted(name for name, _ in bar.ticks) == ["0", "1"] for bar in barriers[1:])
    (negotiation,) = rows.pop("allreduce.of one rank")
    assert (negotiation.name, negotiation.ticks[0][0]) == ("NEGOTIATE_ALLREDUCE", "0"), (
        "its number in the set"
    )
    negotiation, refused = rows.pop("allreduce.different")
    assert (negotiation.name, len(negotiation.ticks)) == ("NEGOTIATE_ALLREDUCE", 2)
    assert (refused.name, refused.names, refused.args) == ("ALLREDUCE", [], None)
    assert not rows


def test_who_comes_late_and_who_never_comes(ranks: Ranks, tmp_path: Path) -> None:
    def wait(path: str) -> None:
        with running() as (rank, _):
            hvd.start_timeline(path)
            hvd.barrier()
            asked = Path("asked")
            if rank == 1:
                wait_until(asked.exists)
                time.sleep(1)
            handle = hvd.allreduce_async(torch.ones(1), name="late")
            asked.touch()
            hvd.synchronize(handle)
            if rank == 0:
                hvd.allreduce_async(torch.ones(1), name="never")

                def shown() -> bool:
                    with contextlib.suppress(json.JSONDecodeError):  # just being written
                        return "allreduce.never" in read(path, whole=False)
                    return False

                wait_until(shown, 30, "an operation that waits shows up while nothing else happens")

    ranks(2, wait, str(tmp_path / "trace.json"), env=DYNAMIC)
    rows = read(tmp_path / "trace.json", whole=False)
    negotiation, operation = rows["allreduce.late"]
    (first, came), (second, came_late) = negotiation.ticks
    assert (first, second) == ("0", "1")
    assert came_late - came > 300_000
    assert negotiation.start == came
    assert negotiation.end is not None and negotiation.end >= came_late
    assert operation.end is not None and operation.end - operation.start < came_late - came
    (never,) = rows["allreduce.never"]
    assert (never.name, [name for name, _ in never.ticks], never.end) == (
        "NEGOTIATE_ALLREDUCE",
        ["0"],
        None,
    )


def test_the_first_operation_has_all_its_ticks(ranks: Ranks, tmp_path: Path) -> None:
    """Also of a rank that asked for it while rank 0 was still in init()."""

    def ask(folder: Path) -> None:
        asked = folder / "asked"
        if World.detect().rank == 0:
            make = timeline.HorovodTrace

            def slowly(*args: Any) -> Any:
                wait_until(asked.exists, 30, "rank 1 asks")
                return make(*args)

            timeline.HorovodTrace = slowly  # type: ignore[misc, assignment]
        with running() as (rank, _):
            handle = hvd.allreduce_async(torch.ones(1), name="first")
            if rank == 1:
                asked.touch()
            hvd.synchronize(handle)

    ranks(2, ask, tmp_path, env={"HOROVOD_TIMELINE": str(tmp_path / "trace.json")})
    negotiation, _ = read(tmp_path / "trace.json")["allreduce.first"]
    assert sorted(name for name, _ in negotiation.ticks) == ["0", "1"]


@pytest.mark.parametrize("mark", ["0", "1"])
def test_cycles_are_marked_when_asked_for(ranks: Ranks, tmp_path: Path, mark: str) -> None:
    def five() -> None:
        with running():
            for _ in range(5):
                hvd.allreduce(torch.ones(1), name="x")

    env = {"HOROVOD_TIMELINE": str(tmp_path / "trace.json"), "HOROVOD_TIMELINE_MARK_CYCLES": mark}
    ranks(2, five, env=env)
    negotiations = read(tmp_path / "trace.json")["allreduce.x"][::2]
    assert len(negotiations) == 5
    events = json.loads((tmp_path / "trace.json").read_text())
    marks = [event["ts"] for event in events if event["ph"] == "i"]
    for bar in negotiations:
        assert bar.end is not None
        assert sum(bar.start <= each <= bar.end for each in marks) == int(mark), (
            "rank 0 answers when all have come"
        )


def train(path: str) -> None:
    with running() as (rank, _):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 300), torch.nn.Linear(300, 3000), torch.nn.Linear(3000, 2)
        )
        unused = torch.nn.Linear(1, 1)
        named = [*model.named_parameters(), *unused.named_parameters(prefix="unused")]
        optimizer = torch.optim.SGD([parameter for _, parameter in named], 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        for step in range(4):
            if step == 1:
                hvd.start_timeline(path)
            model(torch.ones(3, 4) * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.stop_timeline()


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_gradients_of_the_optimizer_appear_under_their_names(
    ranks: Ranks, tmp_path: Path, hosts: list[str]
) -> None:
    ranks(2, train, str(tmp_path / "trace.json"), hosts=hosts, env=DYNAMIC)
    rows = read(tmp_path / "trace.json", whole=False)
    rows.pop("barrier.noname", None)
    shapes = {"0.weight": [300, 4], "0.bias": [300], "1.weight": [3000, 300], "1.bias": [3000]}
    shapes |= {"2.weight": [2, 3000], "2.bias": [2]}
    assert set(rows) == {f"allreduce.{name}" for name in shapes}, "and none for what was not used"
    for name, shape in shapes.items():
        row = rows[f"allreduce.{name}"]
        assert [bar.name for bar in row] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 3, (
            "of the steps since the start"
        )
        for negotiation, operation in zip(row[::2], row[1::2], strict=True):
            assert (negotiation.ticks, negotiation.args) == ([], None)
            assert negotiation.end == operation.start
            assert operation.end is not None and operation.end > operation.start
            assert operation.args == {"dtype": "float32", "shape": str(shape)}


# From when to when


def start_and_stop() -> None:
    with running() as (rank, _):
        hvd.allreduce(torch.ones(1), name="before")
        hvd.start_timeline("a.json")
        hvd.allreduce(torch.ones(1), name="one")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="between")
        hvd.start_timeline("b.json", mark_cycles=True)
        hvd.allreduce(torch.ones(1), name="two")
        hvd.start_timeline("c.json")
        hvd.allreduce(torch.ones(1), name="three")
        hvd.start_timeline("c.json")
        hvd.allreduce(torch.ones(1), name="four")
        hvd.stop_timeline()
        if rank == 0:
            for name, shown in {"a": ["one"], "b": ["two"], "c": ["four"]}.items():
                rows = read(f"{name}.json", whole=False)
                carried_out = {
                    row
                    for row, bars in rows.items()
                    if any(bar.name == "ALLREDUCE" for bar in bars)
                }
                assert carried_out == {f"allreduce.{each}" for each in shown}
        else:
            assert not any(Path(f"{name}.json").exists() for name in "abc")


def test_start_stop_and_start_another(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(2, in_own_folder, env=DYNAMIC)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes


def in_own_folder() -> None:
    folder = Path(f"rank{os.environ['ALLSTEP_RANK']}")
    folder.mkdir()
    os.chdir(folder)
    start_and_stop()


def test_a_second_init_writes_anew(ranks: Ranks, tmp_path: Path) -> None:
    def twice() -> None:
        for name in ("first", "second"):
            with running():
                hvd.allreduce(torch.ones(1), name=name)

    ranks(2, twice, env={"HOROVOD_TIMELINE": str(tmp_path / "trace.json")})
    assert set(read(tmp_path / "trace.json")) == {"allreduce.second", "barrier.noname"}


# What goes wrong


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/no/such/folder/trace.json", "No such file or directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error_of_init(
    ranks: Ranks, path: str, why: str
) -> None:
    def begin() -> str:
        if os.environ["ALLSTEP_RANK"] == "0":
            with pytest.raises(ValueError, match=why) as caught:
                hvd.init()
            assert not hvd.is_initialized()
            return str(caught.value)
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError, match="shut down by rank 0"):
            hvd.barrier()
        return ""

    message, _ = ranks(2, begin, env={"HOROVOD_TIMELINE": path})
    assert path in message


def test_a_disk_that_fills_up_ends_the_timeline_not_the_run(ranks: Ranks, tmp_path: Path) -> None:
    limit = 20_000

    def fill() -> None:
        import resource

        with running() as (rank, size):
            if rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            for _ in range(3):
                for each in range(100):
                    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"x{each}").item() == size
                time.sleep(0.2)

    outcomes = ranks.outcomes(2, fill, env={"HOROVOD_TIMELINE": str(tmp_path / "trace.json")})
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert (
        outcomes[0].output.count(
            "cannot be written: File too large; the timeline ends here, the run continues"
        )
        == 1
    )
    assert not outcomes[1].output
    assert (tmp_path / "trace.json").stat().st_size <= limit
    read(tmp_path / "trace.json", whole=False)


@pytest.mark.soak(20)
def test_a_killed_run_leaves_a_file_that_can_be_read(ranks: Ranks, tmp_path: Path) -> None:
    def die() -> None:
        hvd.init()
        hvd.allreduce(torch.ones(1), name="early")
        until, count = time.monotonic() + 0.4 + 0.01 * (os.getpid() % 10), 0
        while hvd.rank() or time.monotonic() < until or count < 100:
            hvd.allreduce(torch.ones(1), name="x")
            count += 1
        os.kill(os.getpid(), signal.SIGKILL)

    path = tmp_path / "trace.json"
    path.unlink(missing_ok=True)
    outcomes = ranks.outcomes(2, die, env={"HOROVOD_TIMELINE": str(path)})
    assert outcomes[0].exit_code == -signal.SIGKILL
    rows = read(path, whole=False)
    assert [bar.name for bar in rows["allreduce.early"]] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    assert len(rows["allreduce.x"]) > 10


def test_when_another_rank_is_killed_all_is_in_the_file(ranks: Ranks, tmp_path: Path) -> None:
    def die() -> None:
        hvd.init()
        for _ in range(20):
            hvd.allreduce(torch.ones(1), name="x")
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1), name="alone")

    outcomes = ranks.outcomes(2, die, env={"HOROVOD_TIMELINE": str(tmp_path / "trace.json")})
    assert [outcome.exit_code for outcome in outcomes] == [0, -signal.SIGKILL], outcomes
    rows = read(tmp_path / "trace.json", whole=False)
    assert len(rows["allreduce.x"]) == 40
    (alone,) = rows["allreduce.alone"]
    assert (alone.name, [name for name, _ in alone.ticks], alone.end) == (
        "NEGOTIATE_ALLREDUCE",
        ["0"],
        None,
    )


def test_a_forked_child_leaves_the_file_alone(ranks: Ranks, tmp_path: Path) -> None:
    """It is forked while lines are waiting to be written, and ends when more have been written than
    it knows of."""

    def fork() -> None:
        with running():
            child, ready, go = 0, *os.pipe()
            for step in range(20):
                hvd.allreduce(torch.ones(1), name="x")
                if step == 10:
                    child = os.fork()
                    if child == 0:
                        os.read(ready, 1)
                        hvd.shutdown()
                        os._exit(0)
            time.sleep(0.3)
            os.write(go, b"!")
            assert os.waitpid(child, 0)[1] == 0

    ranks(2, fork, env={"HOROVOD_TIMELINE": str(tmp_path / "trace.json")})
    assert len(read(tmp_path / "trace.json")["allreduce.x"]) == 40
