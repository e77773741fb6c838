"""Faults on real ranks, without a launcher: the points of `allstep train`, groups and scripts."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import allstep
import allstep.torch as hvd
from allstep.errors import CollectiveTimeout, PeerLost
from allstep.faults.random_sequence import sequence
from allstep.faults.spec import RandomFaults, parse
from allstep.hvd.gradient_list import GradientList
from allstep.torch.elastic import TorchState
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.run import loop
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worker import work
from support.ranks import Outcome, Ranks

SHORT = ["epochs=1", "precision=float32", "log_every=5", "data.validation=50"]


def train_digits() -> None:
    work(TrainRequest("digits", SHORT, None, Path.cwd() / "out", False, False, None))


def compare_often() -> None:
    loop._COMPARE_EVERY = 4
    train_digits()


def outcomes(ranks: Ranks, function: Any, text: str, **env: str) -> list[Outcome]:
    return ranks.outcomes(2, function, env={"ALLSTEP_FAULTS": text, **env})


def faults_recorded(ranks: Ranks) -> list[tuple[str, int]]:
    """The events of the last run about faults: their texts and ranks."""
    record = ranks.folder / f"ranks-{ranks.calls}" / "out" / "run.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [(line["fault"], line["rank"]) for line in lines if "fault" in line]


def test_a_loss_of_nan_ends_a_training(ranks: Ranks) -> None:
    first, second = outcomes(ranks, train_digits, "nan@rank=1,step=3")
    assert first.exit_code and second.exit_code
    assert "the loss is nan at step 3" in first.output
    assert "fault nan@rank=1,step=3: rank 1 makes its loss NaN at step 3" in second.output
    assert faults_recorded(ranks) == [("nan@rank=1,step=3", 1)]


def test_rank_0_records_its_own_fault_before_it_acts(ranks: Ranks) -> None:
    first, second = outcomes(ranks, train_digits, "kill@rank=0,commit=1")
    assert first.exit_code == -9
    assert "lost rank 0" in second.output
    assert faults_recorded(ranks) == [("kill@rank=0,commit=1", 0)]


def test_a_flipped_bit_is_found_by_the_comparison_of_weights(ranks: Ranks) -> None:
    first, second = outcomes(ranks, compare_often, "flip@rank=1,step=2")
    assert first.exit_code and second.exit_code
    assert "the weights are not equal on all workers after step 4" in first.output
    assert "on rank 1." in first.output


def test_the_rank_with_the_sample_is_the_victim(ranks: Ranks) -> None:
    found = outcomes(ranks, train_digits, "exit:5@sample=17")
    assert sorted(each.exit_code for each in found)[-1] == 5
    assert sum("exits with code 5 at step" in each.output for each in found) == 1


def test_full_disks_leave_no_checkpoint_and_fail_the_run(ranks: Ranks) -> None:
    first, second = outcomes(ranks, without_pauses, "disk-full")
    assert first.exit_code and second.exit_code
    assert "No space left on device (injected)" in first.output
    assert faults_recorded(ranks) == [("disk-full", 0)]


def without_pauses() -> None:
    from allstep.train.checkpoint import saver

    saver.PAUSES = (0.0,)
    train_digits()


# Groups


def collectives() -> str:
    allstep.init()
    try:
        for _ in range(9):
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(3), 0)
    except PeerLost as error:
        return str(error)
    return ""


def test_the_third_collective_of_the_default_group(ranks: Ranks) -> None:
    first, second = outcomes(ranks, collectives, "kill@rank=1,op=3")
    assert second.exit_code == -9 and "kills itself with SIGKILL at collective 3" in second.output
    assert first.result.startswith("all_reduce(float32 [3], SUM): lost rank 1")


def test_a_cut_is_the_loss_of_the_victim_on_every_rank(ranks: Ranks) -> None:
    env = {"ALLSTEP_FAULTS": "cut@rank=1,op=4"}
    on_one_host = ranks.outcomes(2, collectives, env=env)
    on_two_hosts = ranks.outcomes(2, collectives, env=env, hosts=["a", "b"])
    for each in (*on_one_host, *on_two_hosts):
        assert "lost rank 1 (injected fault: its connections were cut)" in each.result


def test_a_rank_that_dies_while_the_world_forms(ranks: Ranks) -> None:
    text = "exit:9@rank=1,during=forming"
    first, second = outcomes(ranks, collectives, text, ALLSTEP_START_TIMEOUT="2")
    assert second.exit_code == 9 and "exits with code 9 during forming" in second.output
    assert first.exit_code == 1 and "rank 1" in first.output


def collectives_with_alarm() -> str:
    world = allstep.init()
    if world.rank == 1:
        # Ends the hanging process: nothing else would.
        signal.alarm(5)
    try:
        for _ in range(5):
            dist.all_reduce(torch.ones(3))
    except CollectiveTimeout as error:
        return str(error)
    return ""


def test_a_rank_that_hangs_is_reported_by_the_others(ranks: Ranks) -> None:
    text = "hang@rank=1,op=3"
    first, second = outcomes(ranks, collectives_with_alarm, text, ALLSTEP_TIMEOUT="1.5")
    assert second.exit_code == -signal.SIGALRM and "hangs at collective 3" in second.output
    assert first.result.startswith("all_reduce(float32 [3], SUM): ") and "rank 1" in first.result


def broadcast_weights() -> None:
    world = allstep.init()
    weights = {"weight": torch.ones(3)}
    mine = Snapshot(7, weights, {}, {}) if world.rank == 0 else None
    broadcast_snapshot(world, mine)


def test_the_broadcast_of_a_checkpoint(ranks: Ranks) -> None:
    first, second = outcomes(ranks, broadcast_weights, "kill@rank=0,during=broadcast")
    assert first.exit_code == -9 and "kills itself with SIGKILL during broadcast" in first.output
    assert second.exit_code == 1 and "lost rank 0" in second.output


def test_random_faults_come_at_the_times_of_their_seed(ranks: Ranks) -> None:
    text = "random:exit:3@every=0.4,seed=2,rank=1"
    spec = parse(text)
    assert isinstance(spec, RandomFaults)
    moment = next(sequence(spec, 2)).seconds
    first, second = outcomes(ranks, wait_for_faults, f"{text};raise@rank=0,seconds=0.1")
    assert second.exit_code == 3 and f"exits with code 3 after {moment:g} s" in second.output
    assert first.exit_code == 0


def test_a_moment_of_the_run(ranks: Ranks) -> None:
    first, second = outcomes(ranks, wait_for_faults, "exit:4@rank=1,seconds=3;raise@seconds=0.1")
    # Rank 1 exits so late that rank 0 has joined it, also on a busy machine.
    assert second.exit_code == 4 and "exits with code 4 after 3 s" in second.output
    assert first.result == "injected by fault raise@seconds=0.1"


def wait_for_faults() -> str:
    from allstep import faults

    allstep.init()
    assert faults.active is not None
    for number in range(1, 2000):
        time.sleep(0.01)
        try:
            if dist.get_rank() == 0:
                faults.active.at_step(number)
        except faults.InjectedFault as error:
            return str(error)
    return ""


# Scripts


def reduce_list() -> list[tuple[float, float]]:
    """Steps of a front-end for another framework: seconds and value of each."""
    hvd.init()
    gradients = GradientList([("weight", torch.zeros(2))])
    found = []
    for _ in range(4):
        began = time.monotonic()
        time.sleep(0.02)
        (result,) = gradients.reduce([torch.ones(2)])
        assert result is not None
        found.append((time.monotonic() - began, float(result[0])))
    hvd.shutdown()
    return found


def test_steps_of_other_frameworks(ranks: Ranks) -> None:
    text = "slow:5@rank=1,step=3;nan@rank=0,step=4;flip@rank=0,step=1;kill@step=9"
    first, second = outcomes(ranks, reduce_list, text)
    values = tuple(value for _, value in first.result)
    assert second.result[2][0] > 0.09
    assert values[:3] == (1.0, 1.0, 1.0) and str(values[3]) == "nan"
    # No weights are known there, so a flipped bit is not reported either.
    assert "flip" not in first.output
    assert "slows down by a factor of 5 at step 3" in second.output


def commit_twice() -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.commit()
    state.commit()


def test_the_commit_of_an_elastic_state(ranks: Ranks) -> None:
    _, second = outcomes(ranks, commit_twice, "exit:6@rank=1,commit=2")
    assert second.exit_code == 6 and "exits with code 6 at commit 2" in second.output
