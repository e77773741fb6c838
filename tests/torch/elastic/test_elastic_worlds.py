"""`hvd.elastic.run` in worlds that lose and gain workers while the processes run."""

import os
import signal

import torch

import allstep.torch as hvd
from support.generations import Generations, run_generations
from support.ranks import Ranks, describe

STEPS = 8
LOST_AT = 3


def train_until_done(victims: dict[str, int]) -> list[object]:
    """Train; a worker of `victims` kills itself in that step, before it adds its gradient."""
    ticket = os.environ["ALLSTEP_TICKET"]
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            inputs = torch.full((4, 3), float(state.step + 1), dtype=torch.float64)
            model(inputs).square().mean().backward()
            if victims.get(ticket) == state.step:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.step += 1
            state.sizes = [*state.sizes, hvd.size()]
            state.commit()

    train(state)
    weights = [parameter.tolist() for parameter in model.parameters()]
    result = [state.sizes, hvd.rank(), os.environ["HOROVOD_RANK"], weights]
    hvd.barrier()
    hvd.shutdown()
    return result


def expected_weights() -> list[object]:
    """One process in a fixed world, from the same start."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((4, 3), step + 1.0, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def test_the_others_train_on_after_a_loss_and_a_new_worker_takes_their_state(ranks: Ranks) -> None:
    """Rank 0 is lost in step 3, another worker in step 5; a new one joins with the first loss."""

    def change(launcher: Generations) -> None:
        launcher.form(["a", "b", "c"])
        launcher.wait_for_exit("a")
        launcher.end("lost rank 0")
        launcher.form(["b", "c", "d"], source=0)
        launcher.wait_for_exit("c")
        launcher.end("lost rank 1")
        launcher.form(["b", "d"], source=0)

    victims = {"a": LOST_AT, "c": 5}
    outcomes = run_generations(ranks, list("abcd"), train_until_done, change, victims)
    assert outcomes["a"].exit_code < 0 and outcomes["c"].exit_code < 0
    for rank, ticket in enumerate("bd"):
        outcome = outcomes[ticket]
        assert outcome.exit_code == 0, describe(outcome)
        sizes, found, variable, weights = outcome.result
        assert sizes == [3] * 5 + [2] * 3
        assert (found, variable) == (rank, str(rank))
        torch.testing.assert_close(weights, expected_weights(), rtol=1e-12, atol=1e-12)


def train_with_new_objects(victims: dict[str, int]) -> list[object]:
    """Make an optimizer in each call and keep the old ones; use norms, a process set and join.

    A worker of `victims` kills itself in that step, in which the others have joined already.
    """
    ticket = os.environ["ALLSTEP_TICKET"]
    hvd.init(process_sets="dynamic")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), hvd.SyncBatchNorm(2)).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    # A process set ends with its world. A new worker adds it here, the others in the callback.
    kept, chosen = [], [hvd.add_process_set([0])]
    state = hvd.elastic.TorchState(model, step=0, sizes=[])
    state.register_reset_callbacks([lambda: chosen.append(hvd.add_process_set([0]))])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        small = torch.nn.Linear(3, 1).double()
        kept.append(hvd.DistributedOptimizer(torch.optim.SGD(small.parameters(), lr=0.1)))
        while state.step < STEPS:
            if chosen[-1].included():
                hvd.allreduce(torch.ones(2), process_set=chosen[-1])
            for net, updates in ((model, optimizer), (small, kept[-1])):
                updates.zero_grad()
                net(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
                updates.step()
            if victims.get(ticket) == state.step:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.join()
            state.step += 1
            state.sizes = [*state.sizes, hvd.size()]
            state.commit()

    train(state)
    result = [state.sizes, [parameter.tolist() for parameter in model.parameters()]]
    hvd.barrier()
    hvd.shutdown()
    return result


def test_objects_of_several_generations_and_a_loss_during_join(ranks: Ranks) -> None:
    """The new worker has made two optimizers, the others more; a callback adds sets again."""

    def change(launcher: Generations) -> None:
        launcher.form(["a", "b", "c"])
        launcher.wait_for_exit("a")
        launcher.end("lost rank 0")
        launcher.form(["b", "c"], source=0)
        launcher.wait_for_exit("c")
        launcher.end("lost rank 1")
        launcher.form(["b", "d"], source=0)

    victims = {"a": LOST_AT, "c": 5}
    outcomes = run_generations(ranks, list("abcd"), train_with_new_objects, change, victims)
    for ticket in "bd":
        outcome = outcomes[ticket]
        assert outcome.exit_code == 0, describe(outcome)
        assert outcome.result[0] == [3] * 3 + [2] * 5
        assert outcome.result == outcomes["b"].result
