"""A checkpoint that rank 0 has read arrives on all ranks, bit for bit."""

import torch

import allstep
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.checkpoint.write_and_read import Snapshot
from support.ranks import Ranks


def snapshot() -> Snapshot:
    draws = torch.Generator().manual_seed(0)
    weights = {
        "float32": torch.randn(3, 5, generator=draws),
        "transposed": torch.randn(4, 6, generator=draws).t(),
        "channels last": torch.randn(2, 3, 4, 4, generator=draws).to(
            memory_format=torch.channels_last
        ),
        "bfloat16": torch.randn(7, generator=draws).bfloat16(),
        "float64": torch.tensor([torch.nan, -torch.inf, 1e300], dtype=torch.float64),
        "counter": torch.tensor(12),
        "flag": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 3),
    }
    optimizer = {
        "float32/momentum_buffer": torch.randn(3, 5, generator=draws),
        "step": torch.tensor(3.0),
    }
    return Snapshot(640, weights, optimizer, {"standing": {"samples": 640}, "names": ["a", "b"]})


def received() -> Snapshot | None:
    world = allstep.init()
    assert broadcast_snapshot(world, None) is None
    return broadcast_snapshot(world, snapshot() if world.rank == 0 else None)


def test_it_arrives_bit_for_bit(ranks: Ranks) -> None:
    sent = snapshot()
    for found in ranks(3, received):
        assert (found.samples, found.state) == (sent.samples, sent.state)
        for theirs, ours in ((found.weights, sent.weights), (found.optimizer, sent.optimizer)):
            assert list(theirs) == list(ours)
            for name, tensor in ours.items():
                assert theirs[name].dtype == tensor.dtype and theirs[name].shape == tensor.shape
                assert torch.equal(bits(theirs[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
