"""Training on shared weights: what runs compute, compared with serial models and with replay."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from allstep.comm.group.init import session
from allstep.kvstore.training import Push
from support.parties import BATCH, EPOCH, Party, gradients, lr, missed, same
from support.ranks import Ranks


def train(party: Party, ends: Sequence[int]) -> tuple[list[Push], dict[str, Tensor]]:
    """Train rounds that end at these positions; return the order log and the weights."""
    party.share()
    pushes, position = [], 0
    for end in ends:
        point = party.round(position, end)
        assert point.position == end
        assert list(point.values) == list(point.parties)
        pushes, position = pushes + point.pushes, end
    return pushes, party.weights()


def run(ranks: Ranks, num_ranks: int, ends: Sequence[int], **options: Any) -> Any:
    """Train; check that all parties agree; return order log and weights."""

    def work() -> object:
        return train(Party(**options), ends)

    results = ranks(num_ranks, work)
    pushes, weights = results[0]
    assert all(other[0] == pushes and same(other[1], weights) for other in results)
    assert [push.made for push in pushes] == list(range(1, len(pushes) + 1))
    assert missed(pushes, ends[-1]) == set()
    return pushes, weights


def serial(pushes: Sequence[Push], correct: str = "none", **options: Any) -> dict[str, Tensor]:
    """The same in a few lines: whole parameters, torch's own step, all versions kept."""
    reader, party = Party(**options), Party(**options)
    versions = [[each.detach().clone() for each in party.model.parameters()]]
    for push in pushes:
        for parameter, value in zip(reader.model.parameters(), versions[push.read], strict=True):
            parameter.data.copy_(value)
        total = [torch.zeros_like(each) for each in versions[0]]
        used = [False] * len(total)
        for claim in push.claims:
            gradients(reader.model, claim)
            for place, each in enumerate(reader.model.parameters()):
                if each.grad is not None:
                    used[place] = True
                    total[place] += each.grad * claim.count / push.count
        for place, each in enumerate(party.model.parameters()):
            each.grad = total[place] if used[place] else None
            if used[place] and correct == "delay":
                moved = each.detach() - versions[push.read][place]
                each.grad = each.grad + 0.04 * each.grad**2 * moved
        party.plain.param_groups[0]["lr"] = push.lrs[0]
        party.plain.step()
        versions.append([each.detach().clone() for each in party.model.parameters()])
    return party.weights()


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare weights and state; a parameter that is never used has no state in torch."""
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_replay_and_a_serial_model_equal_the_run(ranks: Ranks, optimizer: str) -> None:
    # A unit has one step count, so Adam differs where a parameter is used in some steps only.
    options = {"optimizer": optimizer, "width": 1200, "has_rare": optimizer != "adamw"}
    pushes, weights = run(ranks, 3, [44, 80], sleeps=0.005, **options)
    alone = Party(**options)
    assert alone.replay(pushes) is None
    assert same(alone.weights(), weights)
    close(weights, serial(pushes, **options))
    # A share each, cut at the ends of rounds and of the epoch; D18.
    assert {push.count for push in pushes} <= {4}
    first = min(pushes, key=lambda push: push.start)
    assert first.lrs == (pytest.approx(alone.base_lr * 4 / BATCH),)


def options_of(seed: int) -> dict[str, Any]:
    """Options of a random run."""
    return {
        "seed": seed,
        "sync": ["async", "async", "stale:2", "lazy:2"][seed % 4],
        "optimizer": ["sgd", "adamw", "lars"][seed % 3],
        "width": [8, 300][seed // 2 % 2],
        "more": {"correct": ["none", "none", "lr", "delay"][seed // 4 % 4]},
    }


@pytest.mark.soak(5)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replay_of_random_runs(ranks: Ranks, num_ranks: int, soak_round: int) -> None:
    """10 runs with random sleeps; optimizers, modes, corrections and rounds vary."""
    seeds = range(soak_round * 20 + num_ranks % 2, soak_round * 20 + 20, 2)

    def work() -> list[object]:
        # Stay among the ranks between two runs.
        session().join()
        results = []
        for seed in seeds:
            party = Party(sleeps=0.004 * (seed % 3), **options_of(seed))
            results.append(train(party, [20 + seed % 7, 50 + seed % 20]))
            party.made.close()
        session().part()
        return results

    for results, seed in zip(zip(*ranks(num_ranks, work), strict=True), seeds, strict=True):
        pushes, weights = results[0]
        assert all(same(other[1], weights) for other in results)
        assert missed(pushes, 50 + seed % 20) == set()
        alone = Party(**options_of(seed))
        assert alone.replay(pushes) is None
        assert same(alone.weights(), weights), options_of(seed)


@pytest.mark.parametrize("correct", ["none", "lr", "delay"])
def test_corrections(ranks: Ranks, correct: str) -> None:
    options = {"optimizer": "plain", "more": {"correct": correct}}
    pushes, weights = run(ranks, 3, [60], sleeps=0.004, **options)
    base = Party(optimizer="plain").base_lr
    assert any(push.age > 1 for push in pushes)
    close(weights, serial(pushes, correct, **options))
    for push in pushes:
        expected = base / (1 + push.start / 100) * push.count / BATCH
        expected /= max(1, push.age) if correct == "lr" else 1
        assert push.lrs == (pytest.approx(expected),)


def test_lazy_pushes_the_mean_of_its_steps(ranks: Ranks) -> None:
    options = {"sync": "lazy:3", "optimizer": "sgd"}
    pushes, weights = run(ranks, 2, [50, 120], sleeps=0.002, **options)
    assert [push.count for push in pushes if push.made <= 2] == [18, 18]
    # Blocks end at the end of a round and of an epoch.
    assert sorted(push.start + push.count for push in pushes)[2:5] == [50, 60, 78]
    assert all(push.lrs[0] <= 0.05 * push.count / BATCH for push in pushes)
    close(weights, serial(pushes, **options))
    alone = Party(**options)
    assert alone.replay(pushes) is None
    assert same(alone.weights(), weights)


def test_without_scaling_each_push_has_the_full_learning_rate(ranks: Ranks) -> None:
    pushes, _ = run(ranks, 2, [EPOCH], optimizer="plain", more={"scale": False})
    # Another party may push the second claim before it.
    assert min(pushes, key=lambda push: push.start).lrs == (0.1,)


def serial_elastic(pushes: Sequence[Push], alpha: float, **options: Any) -> list[Tensor]:
    """EASGD in a few lines: torch's own step on each party's weights, then the move (1412.6651)."""
    parties = {push.party: Party(**options) for push in pushes}
    center = [each.detach().clone() for each in Party(**options).model.parameters()]
    for push in pushes:
        party = parties[push.party]
        for claim in push.claims:
            gradients(party.model, claim)
            party.plain.param_groups[0]["lr"] = party.base_lr * lr(claim.start)
            party.plain.step()
        for own, common in zip(party.model.parameters(), center, strict=True):
            difference = alpha * (own.detach() - common)
            own.data -= difference
            common += difference
    return center


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_elastic_equals_a_serial_model(ranks: Ranks, optimizer: str) -> None:
    options = {"optimizer": optimizer, "width": 1200, "has_rare": optimizer != "adamw"}
    pushes, weights = run(ranks, 3, [60], sync="elastic:3", sleeps=0.005, **options)
    assert {push.party for push in pushes} == {0, 1, 2}
    assert {len(push.claims) for push in pushes} <= {1, 2, 3} and max(p.age for p in pushes) >= 1
    center = serial_elastic(pushes, 0.9 / 3, **options)
    for (name, _), value in zip(Party(**options).model.named_parameters(), center, strict=True):
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_parties_of_elastic_are_equal_at_a_synchronization_point(ranks: Ranks) -> None:
    """Weights are the center's, optimizer states the mean; the next round begins there."""

    def work() -> object:
        party = Party(sync="elastic:2", optimizer="sgd", width=8, sleeps=0.003, more={"alpha": 0.5})
        shared = party.share()
        copy, own, before = shared._copy, [], shared._copy.before_average

        def note() -> None:
            own.extend(view.clone() for view in copy.states_to_average()[1:])
            before()

        copy.before_average = note
        party.round(0, 60)
        center, state = copy.present[0].clone(), copy.states_to_average()[1:]
        return party.weights(), center.equal(copy.own[0]), own, [each.clone() for each in state]

    (first, at_center, own, mean), (other, _, theirs, _) = ranks(2, work)
    assert at_center and same(first, other)
    assert any(name.endswith("momentum_buffer") for name in first)
    for one, two, both in zip(own, theirs, mean, strict=True):
        assert not one.equal(two) and both.equal((one + two) / 2)
