"""`allstep train --min-workers`: workers are killed, the others continue in memory, others join.

Random kills are in `test_random_kills`, other faults in `test_elastic_faults`.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allstep import runlog
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.step.build import shares_weights
from allstep.world import World
from support.elastic_training import (
    ENVIRONMENT,
    EPOCH,
    OVERRIDES,
    assert_same_end,
    chain,
    changes,
    command,
    complete,
    work_until,
    workers_of,
)
from support.ranks import Ranks, clean_environment, wait_until

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.timeout(300)]


def test_rank_0_is_killed_and_the_others_end_with_the_bits_of_a_restore(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Also the duties of rank 0: one record from the start to the end, whole checkpoints."""
    run, epochs = tmp_path / "run", "epochs=3"
    output = complete(run, epochs, "--fault", "kill@rank=0,step=40")
    first, *_ = changes(run)
    assert first["position"] == 26 * 50 + 37 + 12 * 50 and first["workers"] == 2
    assert "lost rank 0 on localhost: killed by signal 9 (SIGKILL); 2 workers continue" in output
    # The new rank 0 prints no second banner, and writes a file of events of its own.
    assert output.count(" trains digits") == 1 and len(list((run / "tensorboard").iterdir())) == 2
    record = runlog.read(run / "run.jsonl")
    assert len(record.starts) == 1 and record.end is not None
    positions = [step["samples"] for step in record.steps]
    # The step after whose update rank 0 died may be missing in the record, none is there twice.
    assert positions == sorted(set(positions)) and positions[-1] == 3 * 1337
    assert len(positions) >= 3 * 27 - 2
    chain(ranks, [*OVERRIDES, epochs], tmp_path / "reference", 3, run)
    assert_same_end(run, tmp_path / "reference")


# A worker that ends itself at given points: `NUMBER:POINT:WHEN`, where WHEN is a step for `reduce`,
# `update`, `within` and `miss`, else the first generation that counts. `within` is in an update of
# shared weights: half of what the worker owns is neither old nor new. Those that `miss` stay alive:
# they have done their part in the exchange of a step, or in an evaluation, but do not get its result.
DRIVER = """
import os, signal, sys, time
from pathlib import Path

from allstep.comm.join.membership import membership
from allstep.errors import PeerLost
from allstep.parallel.updates import by_owners
from allstep.train.run import loop, worker
from allstep.train.run.rounds import each_step
from allstep.train.step.after_step import AfterStep
from allstep.train.run.worlds import generations
from allstep.train.run.train_request import TrainRequest

out, wait_until, *kills = sys.argv[1].split()
number = membership().number
mine = [(point, int(when)) for each in kills for who, point, when in [each.split(":")] if int(who) == number]


def maybe_die(point, when):
    if any(point == name and when >= first for name, first in mine):
        print(f"worker {number} ends itself: {point} {when}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


# The file that shows that a worker has come so far.
def passed(what):
    return Path(f"{out}.{what}-{position()}")


def maybe_miss(point, when, what):
    for planned in [each for each in mine if each[0] == point and when >= each[1]]:
        mine.remove(planned)
        # Not before another worker has the result: it shall not lose this one before.
        while not passed(what).exists():
            time.sleep(0.01)
        print(f"worker {number} does not get the result: {point} {when}", flush=True)
        raise PeerLost(f"injected: no result for worker {number}")


def after(holder, name, act):
    original = getattr(holder, name)

    def acted(*args, **options):
        result = original(*args, **options)
        act()
        return result

    setattr(holder, name, acted)


def note_load(*_):
    if worker_of[0]._run is not None:
        print(f"worker {number} is behind and takes the state", flush=True)


def before(module, name, act):
    original = getattr(module, name)

    def acted(*args, **options):
        act(*args)
        return original(*args, **options)

    setattr(module, name, acted)


steps = []


def at_step(trainer, batch, *_):
    steps.append(1)
    generation = membership().place.generation
    # The run shall not end before workers have joined.
    if batch.position > 1000 and generation < int(wait_until):
        time.sleep(0.5)
    trainer.optimizer.reduce_gradients, original = reduce, trainer.optimizer.reduce_gradients

    def restored():
        trainer.optimizer.reduce_gradients = original
        return original()

    reduce.then = restored


def reduce():
    maybe_die("reduce", position())
    return reduce.then()


def position():
    return worker_of[0]._run.job.progress.updates + 1 if worker_of else 0


def spoil(sharing):
    if ("within", position()) in mine:
        tensors = [*sharing.ranges.values()]
        states = [value for each in sharing.inner.state.values() for value in each.values()]
        for tensor in [*tensors[: len(tensors) // 2 + 1], *states[: len(states) // 2 + 1]]:
            if hasattr(tensor, "fill_"):
                tensor.fill_(float("nan"))
        maybe_die("within", position())


worker_of = []
before(by_owners._Sharing, "_keep_state", spoil)
before(generations.Generations, "__init__", lambda self, *_: worker_of.append(self))
before(each_step, "reduce_step", at_step)
before(each_step, "update_weights", lambda *_: maybe_die("update", position()))
before(loop, "evaluate", lambda *_: maybe_die("evaluate", membership().place.generation))
before(generations.Generations, "_enter", lambda self, world: maybe_die("enter", world.generation))
before(
    generations,
    "broadcast_snapshot",
    lambda world, *_: maybe_die("broadcast", world.generation) if world.generation else None,
)
before(worker.comm, "init", lambda *_: maybe_die("standby", 0))
before(generations, "load", note_load)
after(AfterStep, "exchange", lambda: maybe_miss("miss", position(), "update"))
after(each_step, "update_weights", lambda: passed("update").touch())
after(
    loop.Run,
    "_num_bad",
    lambda: maybe_miss("miss-evaluation", membership().place.generation, "evaluation"),
)
before(loop.Run, "_grow", lambda *_: passed("evaluation").touch())
overrides = Path(sys.argv[2]).read_text().split("\\n")
worker.work(TrainRequest(overrides[0], overrides[1:], out=Path(out)))
"""


def run_driver(
    folder: Path, kills: list[str], *, workers: int, wait_until: int, overrides: list[str]
) -> Path:
    """Train with `allstep run --min-np 1`, with workers that end themselves."""
    driver, keys, out = folder / "driver.py", folder / "overrides", folder / "run"
    driver.write_text(DRIVER)
    keys.write_text("\n".join(overrides))
    arguments = [str(driver), " ".join([str(out), str(wait_until), *kills]), str(keys)]
    launch = [sys.executable, "-m", "allstep", "run", "-np", str(workers), "--min-np", "1"]
    done = subprocess.run(
        [*launch, sys.executable, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kill in kills:
        who, point, _ = kill.split(":")
        does = "does not get the result" if point.startswith("miss") else "ends itself"
        assert f"worker {who} {does}: {point}" in done.stdout, done.stdout + done.stderr
    (folder / "output").write_text(done.stdout)
    return out


def test_workers_die_in_every_phase_and_no_bit_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 in a reduction, the next rank 0 while the world forms, the source of the first
    broadcast, a worker on standby, and one in an evaluation."""
    kills = ["0:reduce:9", "1:enter:1", "4:standby:0", "2:broadcast:2", "3:evaluate:4"]
    overrides = [*OVERRIDES, "epochs=8"]
    run = run_driver(tmp_path, kills, workers=4, wait_until=4, overrides=overrides)
    moves = changes(run)
    assert moves[0]["position"] == 8 * 50 and moves[0]["workers"] == 2
    assert any(each["joined"] for each in moves)
    positions = [step["samples"] for step in runlog.read(run / "run.jsonl").steps]
    assert positions == sorted(set(positions)) and positions[-1] == 8 * 1337
    chain(ranks, overrides, tmp_path / "reference", 4, run)
    assert_same_end(run, tmp_path / "reference")


def test_owners_of_shared_weights_die_within_their_updates(ranks: Ranks, tmp_path: Path) -> None:
    """The first owner in the first update, then one in the middle, then the last one: the weights
    are those of the last whole update."""
    kills = ["0:within:1", "2:within:12", "3:within:20"]
    overrides = [*OVERRIDES, "epochs=2", "share_weights=true"]
    run = run_driver(tmp_path, kills, workers=4, wait_until=0, overrides=overrides)
    moves = changes(run)
    positions = [step["samples"] for step in runlog.read(run / "run.jsonl").steps]
    assert positions == sorted(set(positions)) and positions[-1] == 2 * 1337
    assert [each["position"] for each in moves if each["lost"]] == [0, 11 * 50, 19 * 50]
    assert runlog.read(run / "run.jsonl").start["undo_bytes"] > 0
    chain(ranks, overrides, tmp_path / "reference", 4, run)
    assert_same_end(run, tmp_path / "reference")


@pytest.mark.parametrize(
    ("given", "is_elastic", "expected"),
    [("auto", False, True), ("auto", True, False), ("true", True, True), ("false", True, False)],
)
def test_an_elastic_run_shares_weights_only_if_requested(
    given: str, is_elastic: bool, expected: bool
) -> None:
    model, cpu = torch.nn.Linear(5000, 6000, device="meta"), torch.device("cpu")
    config = read_config("digits", [f"share_weights={given}", "precision=float32"])
    world = World(0, 2, 0, 2, 0, 1, "h1", "allstep")
    assert shares_weights(config, world, model, cpu, is_elastic) is expected


def test_a_worker_that_is_lost_before_the_run_begins_is_reported(tmp_path: Path) -> None:
    """In the first exchange of all ranks, before rank 0 has claimed the run folder."""
    run = run_driver(
        tmp_path, ["1:enter:0"], workers=2, wait_until=0, overrides=[*OVERRIDES, "epochs=1"]
    )
    first, *_ = changes(run)
    assert "killed by signal 9 (SIGKILL); 1 worker continues from sample 0 after " in first["text"]
    assert (first["position"], first["workers"], first["lost"]) == (0, 1, 1)
    assert runlog.read(run / "run.jsonl").events[-1]["lost"] == 1


def test_survivors_are_one_commit_apart(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 dies before its update 9, and worker 2 does not get the sum of that step: worker 1 has
    committed it alone, and worker 2 takes its state. Later worker 1 does not get the score of an
    evaluation that worker 2 has; both are alive."""
    kills = ["0:update:9", "2:miss:9", "1:miss-evaluation:1"]
    overrides = [*OVERRIDES, "epochs=3"]
    run = run_driver(tmp_path, kills, workers=3, wait_until=1, overrides=overrides)
    first, *others = changes(run)
    assert (first["position"], first["workers"], first["due"]) == (9 * 50, 2, False)
    assert any(each["position"] % EPOCH == 0 and not each["due"] for each in others)
    output = (tmp_path / "output").read_text()
    for worker in (2, 1):
        assert f"worker {worker} is behind and takes the state" in output
    positions = [step["samples"] for step in runlog.read(run / "run.jsonl").steps]
    assert positions == sorted(set(positions)) and positions[-1] == 3 * EPOCH
    chain(ranks, overrides, tmp_path / "reference", 3, run)
    assert_same_end(run, tmp_path / "reference")


def test_below_the_minimum_the_state_is_saved_and_the_run_resumes(tmp_path: Path) -> None:
    """The replacement comes after 1 s, so that half a second is over before."""
    options = ["epochs=2", "--elastic-timeout", "0.5", "--fault", "kill@rank=0,step=20"]
    done = subprocess.run(
        command(tmp_path / "run", *options, workers=2, least=2),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 75, done.stdout + done.stderr
    assert "1 of at least 2 workers are left: waiting up to 0.5 s" in done.stderr
    assert "1 worker lost, 0 joined, " in done.stdout
    assert checkpoint.written(tmp_path / "run" / "checkpoints")[0].name == f"{19 * 50:012}"
    complete(tmp_path / "run", "epochs=2", "--resume", "auto", workers=2, least=2)


TWO_TO_FOUR = ["--workers", "2", "--min-workers", "2", "--max-workers", "4"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--workers", "2", "--min-workers", "3"], "minimum of 3 workers is above their number 2"),
        (
            ["--workers", "3", "--min-workers", "1", "--max-workers", "2"],
            "a maximum of 2 workers is below their number 3",
        ),
        (["--workers", "2", "--spares", "1"], "--spares 1 needs an elastic run; add --min-workers"),
        (["--max-workers", "3"], "--max-workers 3 needs an elastic run"),
        (
            ["--workers", "2", "--min-workers", "1", "--elastic-timeout", "0"],
            "--elastic-timeout 0: expected seconds above 0",
        ),
        (
            # Two workers have two samples each; a later start with more would be refused, too.
            ["batch=4", "model.norm=batch", *TWO_TO_FOUR],
            "4 samples on 3 workers in 1 micro-batch each are 1 at a time",
        ),
    ],
)
def test_bad_input_is_one_line(options: list[str], expected: str, tmp_path: Path) -> None:
    arguments = ["train", "digits", *options, "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "allstep", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "fault" not in line]
    assert expected in line


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "cannot replace single"),
        ({"ALLSTEP_RANK": "0", "ALLSTEP_SIZE": "1"}, "give it --min-np 1 instead"),
        (
            {"ALLSTEP_RANK": "0", "ALLSTEP_SIZE": "1", "ALLSTEP_TICKET": "x"},
            "omit --min-workers",
        ),
    ],
    ids=["mpirun", "allstep run", "allstep run --min-np"],
)
def test_a_launcher_that_cannot_do_it_is_named(
    launcher: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allstep.cli.elastic_options import ElasticOptions
    from allstep.errors import ConfigError
    from allstep.world import World

    for name in ("ALLSTEP_TICKET", "ALLSTEP_RANK", "ALLSTEP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    found = "allstep" if "ALLSTEP_RANK" in launcher else World.detect().launcher
    with pytest.raises(ConfigError, match=expected):
        ElasticOptions(1, None, None, None).check_launcher(found)


def test_the_command_of_the_readme(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    given = "allstep train digits --workers 3 --min-workers 1 --fault kill@rank=0,step=50"
    assert f"`{given}`" in text
    done = subprocess.run(
        [sys.executable, "-m", *given.split(), "epochs=4", "--out", str(tmp_path / "run")],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers continue from sample 3,036 after " in done.stdout
    assert "1 worker lost, " in done.stdout and "0 samples lost" in done.stdout


def wait_for_world(run: subprocess.Popen[str], out: Path, size: int, after: int) -> int:
    """Wait for a change to `size` workers beyond the first `after` changes; return their number."""

    def has_come() -> bool:
        assert run.poll() is None, (out.parent / "output").read_text()
        if not (out / "run.jsonl").exists():
            return False
        steps, moves = runlog.read(out / "run.jsonl").steps, changes(out)[after:]
        # A rank 0 that is killed now has recorded a step of this world.
        has_stepped = bool(steps) and len(steps[-1]["wait"]) == size
        return has_stepped and any(each["workers"] == size for each in moves)

    wait_until(has_come, 120)
    return len(changes(out))


# In float64 and without what depends on the shares.
EXACT = ["precision=float64", "model=small-cnn", "model.norm=none", "model.options={}"]


def test_growing_to_four_and_back_computes_what_one_worker_does(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Also with shares by speed: each change of the workers records that they are even again."""
    run = tmp_path / "run"
    overrides = ["digits", "batch=50", "epochs=400", "log_every=1", *EXACT, "save.seconds=100"]
    overrides.append("shares=speed")
    options = ["--workers", "1", "--min-workers", "1", "--max-workers", "4", "--out", str(run)]
    with (tmp_path / "output").open("w") as output:
        training = subprocess.Popen(
            [sys.executable, "-m", "allstep", "train", *overrides, *options],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            seen = wait_for_world(training, run, 4, 0)
            for process in workers_of(training)[:3]:
                process.kill()
            wait_for_world(training, run, 1, seen)
            training.send_signal(signal.SIGTERM)
            assert training.wait(60) == 75, (tmp_path / "output").read_text()
        finally:
            training.kill()
            training.wait(30)
    steps = runlog.read(run / "run.jsonl").steps
    last = steps[-1]["samples"]
    env = {"OMP_NUM_THREADS": "1"}
    ranks(1, work_until, overrides, tmp_path / "alone", last, False, env=env)
    alone = {step["samples"]: step for step in runlog.read(tmp_path / "alone" / "run.jsonl").steps}
    assert len({len(step["wait"]) for step in steps}) >= 2
    events = runlog.read(run / "run.jsonl").events
    shares = [event for event in events if "shares" in event]
    for move in changes(run):
        at = [event for event in shares if event["samples"] == move["position"]]
        assert [1] * move["workers"] in [event["shares"] for event in at], (move, shares)
        assert move["hosts"] == ["localhost"] * move["workers"]
    for step in steps:
        assert step["loss"] == pytest.approx(alone[step["samples"]]["loss"], rel=1e-10, abs=1e-10)
