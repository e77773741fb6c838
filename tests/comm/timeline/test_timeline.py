"""The timeline: what it shows is what happened, on every rank; it survives kills and full disks,
and never stops a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from allstep.comm.group.plan import RedOpType
from allstep.comm.op.describe import describe
from allstep.comm.timeline import recorder
from allstep.comm.timeline.chrome_trace import described
from allstep.comm.timeline.recorder import RecordedOperation, Recorder, spans
from support.allstep_command import run
from support.hosts import Hosts
from support.ranks import Ranks, held_port, wait_until


class Shown(NamedTuple):
    """An operation in the file, and the spans within it."""

    event: dict
    parts: list[dict]

    def seconds(self, kind: str) -> float:
        return sum(part["dur"] for part in self.parts if part["name"].startswith(kind)) / 1e6


def read(path: Path) -> list[dict]:
    """The events of a file that was ended, checked against the rules of the format."""
    return checked(json.loads(path.read_text()))


def read_unfinished(path: Path) -> list[dict]:
    """The same of a file whose writer was killed, as the viewers read it."""
    text = path.read_text()
    assert text.endswith(",\n")
    return checked(json.loads(text.removesuffix(",\n") + "]"))


def checked(events: list[dict]) -> list[dict]:
    """The rules of the Trace Event Format: what every phase must have, every track named, slices of
    a track nested or apart."""
    named, tracks = set(), {}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                key = {"process_sort_index": "sort_index", "process_labels": "labels"}.get(
                    event["name"], "name"
                )
                assert event["name"] in (
                    "process_name",
                    "thread_name",
                    "process_sort_index",
                    "process_labels",
                )
                assert list(event["args"]) == [key]
                named.add((event["name"], event["pid"], event["tid"]))
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                tracks.setdefault((event["pid"], event["tid"]), []).append(event)
            case "i":
                assert event["s"] in ("g", "p", "t")
                assert event["ts"] >= 0
            case phase:
                pytest.fail(f"an event of phase {phase}")
    for (pid, tid), slices in tracks.items():
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
        assert_nested(slices)
    return events


def assert_nested(slices: list[dict]) -> None:
    open_until: list[float] = []
    for each in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= each["ts"] + 0.0005:
            open_until.pop()
        assert not open_until or each["ts"] + each["dur"] <= open_until[-1] + 0.002
        open_until.append(each["ts"] + each["dur"])


def shown(events: list[dict]) -> dict[int, list[Shown]]:
    """By rank, in order."""
    found: dict[int, list[Shown]] = {}
    latest: dict[tuple, Shown] = {}
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            if event["cat"] == "operation":
                latest[track] = Shown(event, [])
                found.setdefault(event["pid"], []).append(latest[track])
            else:
                latest[track].parts.append(event)
    return found


def assert_filled(operation: Shown) -> None:
    """The spans fill the operation from its beginning to its end, without gap or overlap."""
    at = operation.event["ts"]
    for part in operation.parts:
        assert part["ts"] == pytest.approx(at, abs=0.002)
        at = part["ts"] + part["dur"]
    assert at == pytest.approx(operation.event["ts"] + operation.event["dur"], abs=0.002)


# What it shows


def many_collectives(path: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import allstep

    world = allstep.init()
    allstep.comm.start_timeline(path)
    dist.all_reduce(torch.ones(3, 4))
    handles = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(3)]
    for handle in handles:
        handle.wait()
    dist.broadcast(torch.ones(100_000), 1)
    dist.all_gather([torch.zeros(5) for _ in range(world.size)], torch.ones(5))
    dist.reduce_scatter(torch.zeros(50_000), [torch.ones(50_000) for _ in range(world.size)])
    dist.gather(
        torch.ones(4), [torch.zeros(4) for _ in range(world.size)] if world.rank == 0 else None
    )
    dist.barrier()
    other = dist.new_group()
    dist.all_reduce(torch.ones(7), group=other)
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    model(torch.ones(2, 300)).sum().backward()
    allstep.comm.stop_timeline()
    dist.all_reduce(torch.ones(1))


def test_every_collective_of_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, many_collectives, str(tmp_path / "trace.json"))
    by_rank = shown(read(tmp_path / "trace.json"))
    assert sorted(by_rank) == [0, 1, 2]
    counts = [Counter(each.event["args"]["call"] for each in by_rank[rank]) for rank in range(3)]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["all_reduce(float32 [3, 4], SUM)"] == 1
    assert counts[0]["all_reduce(float32 [200000], SUM)"] == 3
    assert counts[0]["all_reduce(float32 [1], SUM)"] == 0
    names = Counter(each.event["name"] for each in by_rank[0])
    assert {"broadcast", "all_gather", "reduce_scatter", "gather", "barrier"} <= set(names)
    assert counts[0]["all_reduce(float32 [90300], SUM)"] == 1, "DDP's bucket"
    assert len({each.event["args"]["group"] for each in by_rank[0]}) == 2
    for each in (each for rank in range(3) for each in by_rank[rank]):
        assert_filled(each)


def test_what_is_told_of_a_call(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, many_collectives, str(tmp_path / "trace.json"))
    first = shown(read(tmp_path / "trace.json"))[2][0].event
    assert first["name"] == "all_reduce"
    told = {name: first["args"][name] for name in ("dtype", "shape", "bytes", "reduction")}
    assert told == {"dtype": "float32", "shape": [3, 4], "bytes": 48, "reduction": "SUM"}


def test_adding_is_shown_where_something_is_added(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, many_collectives, str(tmp_path / "trace.json"))
    for operations in shown(read(tmp_path / "trace.json")).values():
        for each in operations:
            adds = each.event["name"] in ("all_reduce", "reduce_scatter")
            assert (each.seconds("adding") > 0) == adds, each.event
            assert (each.seconds("gloo") > 0) == (each.event["name"] == "gather"), each.event


@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_who_is_late_is_waited_for(ranks: Ranks, tmp_path: Path, numel: int) -> None:
    def late(path: str) -> None:
        import torch.distributed as dist

        import allstep

        world = allstep.init()
        allstep.comm.start_timeline(path)
        for turn in range(3):
            here = [Path(f"{turn}.{rank}") for rank in range(3)]
            here[world.rank].touch()
            if world.rank == 1:  # comes last, whatever the others have been held up by
                wait_until(lambda here=here: all(file.exists() for file in here))
                time.sleep(0.3)
            dist.all_reduce(torch.ones(numel))

    ranks(3, late, str(tmp_path / "trace.json"))
    by_rank = shown(read(tmp_path / "trace.json"))
    turns = []
    for turn in range(3):
        operations = [by_rank[rank][turn] for rank in range(3)]
        waited = [operation.seconds("waiting") for operation in operations]
        ends = [operation.event["ts"] + operation.event["dur"] for operation in operations]
        turns.append((*waited, (max(ends) - min(ends)) / 1e6))
    # On a busy machine ranks 0 and 2 may also be late, or the rank that came last has to wait for a
    # core; not in every turn.
    assert any(min(a, c) > 0.25 and b < 0.1 and apart < 0.1 for a, b, c, apart in turns), turns


def test_an_operation_that_fails_says_so(ranks: Ranks, tmp_path: Path) -> None:
    def differ(path: str) -> None:
        import torch.distributed as dist

        import allstep

        world = allstep.init()
        allstep.comm.start_timeline(path)
        with pytest.raises(allstep.AllstepError):
            dist.all_reduce(torch.ones(3 + world.rank))
        dist.all_reduce(torch.ones(3))

    ranks(2, differ, str(tmp_path / "trace.json"))
    for operations in shown(read(tmp_path / "trace.json")).values():
        assert [each.event["args"].get("error") for each in operations] == [
            "CollectiveMismatch",
            None,
        ]


# Where it is written


def test_start_stop_and_start_again(ranks: Ranks, tmp_path: Path) -> None:
    """Also that it needs only a group on some store of torch's, here a TCPStore."""

    def three_times(folder: str, port: int) -> None:
        import torch.distributed as dist

        import allstep.comm
        from allstep.comm.timeline import timeline

        rank = int(os.environ["ALLSTEP_RANK"])
        with pytest.raises(allstep.UserError, match=r"call allstep.init\(\) first"):
            allstep.comm.start_timeline(f"{folder}/0")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
        dist.init_process_group("allstep", store=store, rank=rank, world_size=2)
        for k in range(1, 4):
            allstep.comm.start_timeline(f"{folder}/{k}")
            with pytest.raises(allstep.UserError, match="already"):
                allstep.comm.start_timeline(f"{folder}/other")
            dist.all_reduce(torch.ones(k))
            allstep.comm.stop_timeline()
            allstep.comm.stop_timeline()
            assert recorder.active is None
            dist.all_reduce(torch.ones(100))
        dist.barrier()
        group = dist.distributed_c10d._get_default_group()
        room = dist.PrefixStore(f"timeline/{timeline._process.number}", group.get_group_store())
        assert room.check(["start"])
        assert not room.check(["1/0"]), "what was read is deleted"
        dist.barrier()
        dist.destroy_process_group()

    with held_port() as port:
        ranks(2, three_times, str(tmp_path), port)
    for k in range(1, 4):
        by_rank = shown(read(tmp_path / str(k)))
        assert [[each.event["args"]["shape"] for each in by_rank[rank]] for rank in range(2)] == [
            [[k]]
        ] * 2
        assert by_rank[0][0].event["ts"] < 10e6, "times begin with the timeline"
    assert not (tmp_path / "0").exists()
    assert not (tmp_path / "other").exists()


def test_operations_that_come_too_fast_are_counted(ranks: Ranks, tmp_path: Path) -> None:
    def hurry(path: str) -> None:
        import torch.distributed as dist

        import allstep
        from allstep.comm.timeline import collect as gathering

        gathering.Recorder = lambda: Recorder(max_operations=5)
        allstep.init()
        allstep.comm.start_timeline(path)
        for _ in range(20):
            dist.all_reduce(torch.ones(1))

    ranks(2, hurry, str(tmp_path / "trace.json"))
    events = read(tmp_path / "trace.json")
    by_rank = shown(events)
    for rank in range(2):
        notes = [
            event["name"] for event in events if event["pid"] == rank and "missing" in event["name"]
        ]
        num_missing = sum(int(note.split()[0]) for note in notes)
        assert num_missing > 0
        assert len(by_rank[rank]) + num_missing == 20


def test_one_rank_alone(ranks: Ranks, tmp_path: Path) -> None:
    def alone(path: str) -> None:
        import torch.distributed as dist

        import allstep

        allstep.init()
        allstep.comm.start_timeline(path)
        dist.all_reduce(torch.ones(1))

    ranks(1, alone, str(tmp_path / "trace.json"))
    assert read(tmp_path / "trace.json")[0]["args"] == {"name": "rank 0 on testhost"}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/no/such/folder/trace.json", "No such file or directory"),
        ("/dev/full", "No space left on device"),
        ("pipe", "is a pipe, expected a file"),
    ],
)
def test_a_file_that_cannot_be_written(
    ranks: Ranks, tmp_path: Path, path: str, reason: str
) -> None:
    if path == "pipe":
        path = str(tmp_path / "pipe")
        os.mkfifo(path)

    def start(path: str, good: str) -> str:
        import torch.distributed as dist

        import allstep

        allstep.init()
        with pytest.raises(allstep.UserError) as caught:
            allstep.comm.start_timeline(path)
        dist.all_reduce(torch.ones(3))
        allstep.comm.start_timeline(good)
        dist.all_reduce(torch.ones(4))
        return str(caught.value)

    errors = ranks(2, start, path, str(tmp_path / "good.json"))
    assert errors == [f"the timeline {path!r} cannot be written: {reason}"] * 2
    assert [each.event["args"]["shape"] for each in shown(read(tmp_path / "good.json"))[1]] == [[4]]


def test_a_variable_with_a_bad_path_is_told_before_training(ranks: Ranks) -> None:
    def init() -> None:
        import allstep

        allstep.init()

    outcomes = ranks.outcomes(2, init, env={"ALLSTEP_TIMELINE": "/no/such/folder/t"})
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert (
            "ConfigError: the timeline '/no/such/folder/t' cannot be written: No such file"
            in outcome.output
        )


def test_a_disk_that_fills_up_ends_the_timeline_not_the_run(ranks: Ranks, tmp_path: Path) -> None:
    limit = 20_000

    def fill(path: str) -> tuple[bool, float]:
        import resource

        import torch.distributed as dist

        import allstep

        world = allstep.init()
        if world.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        allstep.comm.start_timeline(path)
        began = time.monotonic()
        more = torch.ones(1)
        while more.item():
            dist.all_reduce(torch.ones(10))
            time.sleep(0.005)
            more = torch.tensor(
                [float(recorder.active is not None and time.monotonic() < began + 60)]
            )
            dist.all_reduce(more)
        allstep.comm.stop_timeline()
        return recorder.active is None, time.monotonic() - began

    outcomes = ranks.outcomes(3, fill, str(tmp_path / "trace.json"))
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], outcomes
    assert all(outcome.result[0] and outcome.result[1] < 60 for outcome in outcomes)
    assert (
        outcomes[0].output.count(
            "cannot be written: File too large; the timeline ends here, the run continues"
        )
        == 1
    )
    assert not outcomes[1].output
    assert (tmp_path / "trace.json").stat().st_size <= limit
    assert read_unfinished(tmp_path / "trace.json")


def test_a_forked_child_leaves_the_file_alone(ranks: Ranks, tmp_path: Path) -> None:
    def fork(path: str) -> None:
        import atexit

        import torch.distributed as dist

        import allstep

        allstep.init()
        allstep.comm.start_timeline(path)
        dist.all_reduce(torch.ones(1))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert recorder.active is None
                atexit._run_exitfuncs()  # what `sys.exit` would come to
                allstep.comm.stop_timeline()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        dist.all_reduce(torch.ones(2))

    ranks(2, fork, str(tmp_path / "trace.json"))
    for operations in shown(read(tmp_path / "trace.json")).values():
        assert [each.event["args"]["shape"] for each in operations] == [[1], [2]]


@pytest.mark.soak(10)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_kill_leaves_a_file_that_can_be_read(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    def work(path: str) -> float:
        import torch.distributed as dist

        import allstep

        world = allstep.init()
        allstep.comm.start_timeline(path)
        began = time.monotonic()
        try:
            while True:
                dist.all_reduce(torch.ones(100))
                time.sleep(0.02)
                if world.rank == victim and time.monotonic() > began + 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        except RuntimeError:
            ending = time.monotonic()
            allstep.comm.stop_timeline()
            return time.monotonic() - ending

    found = []
    for turn in range(3):
        path = tmp_path / f"{turn}.json"
        outcomes = ranks.outcomes(3, work, str(path))
        codes = [outcome.exit_code for outcome in outcomes]
        assert codes == [-9 if rank == victim else 0 for rank in range(3)], outcomes
        left = [outcome.result for outcome in outcomes if outcome.rank != victim]
        assert all(seconds < 15 for seconds in left), "nobody waits long for the dead"
        by_rank = shown((read_unfinished if victim == 0 else read)(path))
        assert sorted(by_rank) == [0, 1, 2]
        found.append(
            [(last.event["ts"] + last.event["dur"]) / 1e6 for *_, last in by_rank.values()]
        )
        if (
            min(found[-1]) > 3 - 1.6
        ):  # a machine that stands still takes more with it, but not each time
            return
    pytest.fail(f"more than 1.6 of 3 seconds are missing: {found}")


# Under the launcher, and over several hosts

SCRIPT = """
import allstep, torch, torch.distributed as dist
world = allstep.init()
for numel in (10, 100_000):
    dist.all_reduce(torch.ones(numel))
dist.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.usefixtures("processes")
def test_the_variable_under_the_launcher(script: Path, tmp_path: Path) -> None:
    """The script does not shut down: the file is ended when the process is."""
    done = run(
        "run",
        "-np",
        "2",
        sys.executable,
        script,
        env={"ALLSTEP_TIMELINE": str(tmp_path / "trace.json")},
    )
    assert done.code == 0, done.err
    by_rank = shown(read(tmp_path / "trace.json"))
    assert [[each.event["name"] for each in by_rank[rank]] for rank in range(2)] == [
        ["all_reduce", "all_reduce", "barrier"]
    ] * 2


def test_two_hosts_in_one_file(two_hosts: Hosts, script: Path, tmp_path: Path) -> None:
    done = run(
        *("run", "-np", "3", "-H", "h1:1,h2:2", "--ssh", two_hosts.ssh, "python", script),
        env={"ALLSTEP_TIMELINE": str(tmp_path / "trace.json")},
    )
    assert done.code == 0, done.err
    events = read(tmp_path / "trace.json")
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(names) == ["rank 0 on h1", "rank 1 on h2", "rank 2 on h2"]
    by_rank = shown(events)
    for rank in range(3):
        small, large, _ = by_rank[rank]
        assert_filled(large)
        crosses = rank < 2  # there are as many lanes as the smallest host has ranks: one
        assert (small.seconds("between hosts") > 0) == crosses
        assert (large.seconds("between hosts") > 0) == crosses
    crossing = {
        part["name"] for part in by_rank[0][1].parts if part["name"].startswith("between hosts: ")
    }
    assert crossing <= {
        f"between hosts: {name}" for name in ("tree", "ring", "butterfly", "star", "native")
    }
    assert crossing


@pytest.mark.parametrize("algorithm", ["tree", "ring", "butterfly", "star", "native"])
def test_each_algorithm_is_named_and_does_its_work(
    ranks: Ranks, tmp_path: Path, algorithm: str
) -> None:
    def add_up(path: str) -> list[float]:
        import torch.distributed as dist

        import allstep

        world = allstep.init()
        allstep.comm.start_timeline(path)
        totals = []
        for numel in (10, 100_000):
            value = torch.full((numel,), float(world.rank + 1))
            dist.all_reduce(value)
            totals += value.unique().tolist()
        return totals

    path = tmp_path / "trace.json"
    assert (
        ranks(3, add_up, str(path), hosts=["a", "b", "b"], env={"ALLSTEP_ALGORITHM": algorithm})
        == [[6, 6]] * 3
    )
    for operation in shown(read(path))[0]:
        crossing = {
            part["name"] for part in operation.parts if part["name"].startswith("between hosts")
        }
        assert f"between hosts: {algorithm}" in crossing


def can_have_a_time_of_its_own() -> bool:
    command = ["unshare", "--time", "--monotonic", "5000", "--fork", "true"]
    return (
        bool(shutil.which("unshare"))
        and subprocess.run(command, capture_output=True).returncode == 0
    )


@pytest.mark.usefixtures("namespaces")
@pytest.mark.skipif(
    not can_have_a_time_of_its_own(),
    reason="needs a kernel with time namespaces, and the right to make one",
)
def test_hosts_whose_clocks_differ_are_shown_on_one(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks 1 and 2 are in one time namespace: their clock is 5,000 seconds ahead."""

    def work(script: str, meeting: str) -> None:
        rank = int(os.environ["ALLSTEP_RANK"])
        command = [sys.executable, script]
        if rank == 1:
            command = ["unshare", "--time", "--monotonic", "5000", "--fork", *command]
        if rank == 2:
            while not Path(meeting).exists():
                time.sleep(0.01)
            command = ["nsenter", f"--time=/proc/{Path(meeting).read_text()}/ns/time", *command]
        subprocess.run(command, check=True)

    meeting, script = tmp_path / "pid", tmp_path / "script.py"
    note = (
        f"import os\nif os.environ['ALLSTEP_RANK'] == '1':\n    open('{meeting}.new',"
        " 'w').write(str(os.getpid()))\n"
    )
    script.write_text(note + f"    os.rename('{meeting}.new', '{meeting}')\n" + SCRIPT)
    ranks(
        3, work, str(script), str(meeting), env={"ALLSTEP_TIMELINE": str(tmp_path / "trace.json")}
    )
    events = read(tmp_path / "trace.json")
    labels = {
        event["pid"]: event["args"]["labels"]
        for event in events
        if event["name"] == "process_labels"
    }
    assert sorted(labels) == [1, 2], "rank 0's clock is the measure"
    assert labels[1] == labels[2], "ranks on one clock have one offset"
    error = float(labels[1].split()[2])
    assert error < 1000, "milliseconds; the clocks are 5,000 seconds apart"
    by_rank = shown(events)
    ends = [by_rank[rank][-1].event["ts"] + by_rank[rank][-1].event["dur"] for rank in range(3)]
    assert max(ends) - min(ends) < 5e6


# The pieces


def operation(*marks: tuple[int, str], ended: int) -> RecordedOperation:
    return RecordedOperation("0", "barrier", marks, ended, "")


def test_spans_follow_the_marks() -> None:
    marks = (
        (0, "moving"),
        (10_000, "waiting"),
        (30_000, "moving"),
        (30_100, "adding"),
        (40_000, "moving"),
    )
    assert list(spans(operation(*marks, ended=40_200))) == [
        ("moving", 0, 10_000),
        ("waiting", 10_000, 30_100),
        ("adding", 30_100, 40_200),
    ]


def test_nested_kinds_return_to_what_was_before() -> None:
    running = recorder.Running()
    running.during("between hosts", lambda: running.during("adding", lambda: None))
    assert [kind for _, kind in running.marks] == [
        "moving",
        "between hosts",
        "adding",
        "between hosts",
        "moving",
    ]


def test_what_is_not_taken_is_counted() -> None:
    kept = Recorder(max_operations=2)
    for _ in range(5):
        with kept.operation("0", "barrier"):
            pass
    operations, num_left_out = kept.take()
    assert (len(operations), num_left_out) == (2, 3)
    assert kept.take() == ([], 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            describe("all_reduce", torch.bfloat16, [2, 3], RedOpType.PREMUL_SUM),
            ("bfloat16", [2, 3], 12, "PREMUL_SUM"),
        ),
        (describe("broadcast", torch.int64, [], None, ", from 3"), ("int64", [], 8, None)),
        (
            describe("all_gather", torch.float64, None, None, ", [3, 4]"),
            ("float64", None, None, None),
        ),
        ("barrier", (None, None, None, None)),
    ],
)
def test_the_description_of_a_call_is_understood(text: str, expected: tuple) -> None:
    name, details = described(text)
    assert name == text.partition("(")[0]
    assert details.pop("call") == text
    assert tuple(details.get(key) for key in ("dtype", "shape", "bytes", "reduction")) == expected


def test_a_plain_group_reads_the_variable(ranks: Ranks, tmp_path: Path) -> None:
    """`init_process_group("allstep")` alone, as under torchrun."""
    file = tmp_path / "plain.json"

    def work() -> None:
        import torch.distributed as dist

        import allstep.comm
        from support.default_group import joined

        with joined():
            dist.all_reduce(torch.ones(100))
            allstep.comm.stop_timeline()  # a script's end does that; these ranks end otherwise

    ranks(2, work, env={"ALLSTEP_TIMELINE": str(file)})
    assert {
        event["pid"] for event in json.loads(file.read_text()) if event["name"] == "all_reduce"
    } == {0, 1}
