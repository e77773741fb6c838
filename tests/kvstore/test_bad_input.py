"""Mistakes of a script: each gets one line with what was found, what was expected, and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import allstep.kvstore
from allstep.errors import (
    CheckpointError,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    UserError,
)
from allstep.kvstore import KVStore
from support.ranks import Ranks

SPARSE = torch.eye(3).to_sparse()
WITH_KEY = {
    "before init": (
        lambda kv: kv.push("x", torch.ones(3, 3)),
        "push: key 'x' is not among the 1 keys of the store; call init for it first",
    ),
    "misspelled": (
        lambda kv: kv.pull("ww", out=torch.ones(3, 3)),
        r"call init for it first; did you mean 'w'\?",
    ),
    "other shape": (
        lambda kv: kv.push("w", torch.ones(3)),
        r"push: key 'w' is float32 \[3, 3\], found float32 \[3\]; pass a tensor of that shape",
    ),
    "other type": (
        lambda kv: kv.pull("w", out=torch.ones(3, 3, dtype=torch.float64)),
        r"pull: key 'w' is float32 \[3, 3\], found float64 \[3, 3\]",
    ),
    "mixed kinds": (
        lambda kv: kv.init(3, torch.ones(1)),
        "init: key 3 has type int, but key 'w' of this store has type str",
    ),
    "duplicate": (lambda kv: kv.init("w", torch.ones(3, 3)), "duplicate init of key 'w'"),
    "twice in a list": (
        lambda kv: kv.init(["a", "a"], [torch.ones(1)] * 2),
        "duplicate init of key 'a'",
    ),
    "two values": (lambda kv: kv.init("a", [torch.ones(1)] * 2), "2 values for key 'a'"),
    "no tensor": (lambda kv: kv.push("w", 3.0), "value of key 'w' is a float; expected a torch"),
    "no value": (lambda kv: kv.push("w", []), "push: no value for key 'w'"),
    "no out": (lambda kv: kv.pull("w"), "pull: out is missing; pass the tensors"),
    "no out to broadcast": (
        lambda kv: kv.broadcast("a", torch.ones(1), out=None),
        "broadcast: out is missing",
    ),
    "sparse out": (
        lambda kv: kv.pull("w", out=SPARSE, ignore_sparse=False),
        "pull: the out of key 'w' is sparse .*; pass a dense tensor, or call row_sparse_pull",
    ),
    "sparse out of pushpull": (
        lambda kv: kv.pushpull("w", torch.ones(3, 3), out=SPARSE),
        "the out of key 'w' is sparse",
    ),
    "sparse gradient": (
        lambda kv: kv.push("w", SPARSE),
        "push of key 'w': the gradient is not made of rows; .* or pass value.to_dense()",
    ),
    "dense out for rows": (
        lambda kv: kv.row_sparse_pull("w", out=torch.ones(3, 3), row_ids=[0]),
        "the out of key 'w' is not a sparse COO tensor",
    ),
    "rows missing": (lambda kv: kv.row_sparse_pull("w", out=SPARSE), "row_ids is missing"),
    "rows outside": (
        lambda kv: kv.row_sparse_pull("w", out=SPARSE.clone(), row_ids=[1, 3]),
        "row_ids from 1 to 3, but key 'w' has rows 0 to 2",
    ),
    "rows that are no numbers": (
        lambda kv: kv.row_sparse_pull("w", out=SPARSE.clone(), row_ids=[0.5]),
        "row_ids are float32; expected integers",
    ),
    "no optimizer class": (
        lambda kv: kv.set_optimizer(nn.Linear, lr=0.1),
        "set_optimizer: Linear is no torch optimizer; expected a class such as torch.optim.SGD",
    ),
    "name of a class": (lambda kv: kv.set_optimizer("sgd"), "'sgd' is no torch optimizer"),
    "unknown setting": (
        lambda kv: kv.set_optimizer(torch.optim.SGD, lr=0.1, momentun=0.9),
        "SGD has no setting 'momentun'; did you mean 'momentum'?",
    ),
    "bad setting": (
        lambda kv: kv.set_optimizer(torch.optim.SGD, lr=-0.1),
        "SGD with .* cannot make a step: ValueError: Invalid learning rate",
    ),
    "setting that is an object": (
        lambda kv: kv.set_optimizer(torch.optim.SGD, lr=torch.ones(2)),
        "lr=.* is a Tensor; expected numbers",
    ),
    "settings of an optimizer": (
        lambda kv: kv.set_optimizer(torch.optim.SGD([torch.ones(1)], lr=0.1), momentum=0.9),
        "set_optimizer: momentum next to an optimizer",
    ),
    "groups": (
        lambda kv: kv.set_optimizer(
            torch.optim.SGD(
                [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "lr": 1.0}], lr=0.1
            )
        ),
        "the parameter groups differ in lr",
    ),
    "closure": (
        lambda kv: kv.set_optimizer(torch.optim.LBFGS),
        "LBFGS with .* cannot make a step",
    ),
    "compression without a type": (
        lambda kv: kv.set_gradient_compression({"threshold": 0.5}),
        "set_gradient_compression.*expected a dict with the key 'type', such as",
    ),
    "unknown compression": (
        lambda kv: kv.set_gradient_compression({"type": "2bits"}),
        "set_gradient_compression: type=2bits: unknown compression; did you mean '2bit'",
    ),
    "threshold below zero": (
        lambda kv: kv.set_gradient_compression({"type": "2bit", "threshold": -1}),
        "type=2bit:-1: the threshold -1 is not above 0",
    ),
    "threshold of another type": (
        lambda kv: kv.set_gradient_compression({"type": "bf16", "threshold": 1}),
        "type 'bf16' takes no threshold; remove it, or choose '2bit'",
    ),
    "unknown setting of compression": (
        lambda kv: kv.set_gradient_compression({"type": "2bit", "treshold": 1}),
        "unknown setting 'treshold'; did you mean 'threshold'",
    ),
    "unknown capability": (lambda kv: kv.is_capable("optimiser"), "did you mean 'optimizer'?"),
    "state without an optimizer": (
        lambda kv: kv.save_optimizer_states("f"),
        "save_optimizer_states: the store has no optimizer",
    ),
    "no function": (lambda kv: kv.set_updater(3), "set_updater"),
}


@pytest.mark.parametrize("mistake", WITH_KEY)
@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_a_mistake_gets_one_line(name: str, mistake: str) -> None:
    call, text = WITH_KEY[mistake]
    with allstep.kvstore.create(name) as kv:
        kv.init("w", torch.zeros(3, 3))
        with pytest.raises(UserError, match=text) as caught:
            call(kv)
        assert "\n" not in str(caught.value)
        # The store works on.
        out = torch.ones(3, 3)
        kv.pull("w", out=out)
        assert not out.any()


@pytest.mark.parametrize("name", ["dist_async", "dist_stale:2"])
def test_async_needs_an_optimizer(name: str) -> None:
    with allstep.kvstore.create(name) as kv:
        kv.init("w", torch.zeros(3))
        text = f"a '{name}' store updates at each push and has no optimizer yet; call set_optimizer"
        with pytest.raises(UserError, match=text):
            kv.push("w", torch.ones(3))


def test_a_function_updates_local_stores_only() -> None:
    with (
        allstep.kvstore.create("dist_sync") as kv,
        pytest.raises(UserError, match="use set_optimizer, or a 'local' store"),
    ):
        kv.set_updater(lambda key, gradient, value: None)


def test_integers_have_no_optimizer() -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        kv.init("counts", torch.zeros(3, dtype=torch.int64))
        kv.push("counts", torch.ones(3, dtype=torch.int64))
        with pytest.raises(UserError, match=r"SGD cannot update a value of int64 \[3\]"):
            kv.set_optimizer(torch.optim.SGD, lr=0.1)


def test_stores_that_sum_have_no_optimizer() -> None:
    with (
        allstep.kvstore.create("horovod") as kv,
        pytest.raises(UserError, match="a 'horovod' store only sums; create 'dist_sync'"),
    ):
        kv.set_optimizer(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "no such file"), (b"no tensors", "no file of save_optimizer_states")],
)
def test_a_file_without_states(tmp_path: Any, content: bytes | None, text: str) -> None:
    path = tmp_path / "states"
    if content is not None:
        path.write_bytes(content)
    kv = allstep.kvstore.create("local")
    kv.set_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(CheckpointError, match=text):
        kv.load_optimizer_states(path)


Differing = dict[str, tuple[Callable[[KVStore], None], str]]
DIFFERING: Differing = {
    "shapes": (
        lambda kv: kv.init("w", torch.zeros(3 + kv.rank)),
        r'init: rank 0 passes \["w", "float32", \[3\]\], rank 1 passes \["w", "float32", \[4\]\]',
    ),
    "keys": (
        lambda kv: kv.init(list(range(kv.rank, 2)), [torch.zeros(3)] * (2 - kv.rank)),
        "init: rank 0 passes ",
    ),
    "optimizers": (
        lambda kv: kv.set_optimizer(torch.optim.SGD, lr=0.1 * (kv.rank + 1)),
        r"set_optimizer: rank 0 passes .*\"lr\": 0.1.*, rank 1 passes .*\"lr\": 0.2",
    ),
}


@pytest.mark.parametrize("what", DIFFERING)
def test_workers_pass_the_same(ranks: Ranks, what: str) -> None:
    call, text = DIFFERING[what]

    def work() -> None:
        kv = allstep.kvstore.create("dist_async")
        with pytest.raises(UserError, match=text):
            call(kv)

    ranks(2, work)


def test_a_call_of_all_workers_needs_all(ranks: Ranks) -> None:
    def work() -> str:
        kv = allstep.kvstore.create("dist_async")
        kv.init(1, torch.zeros(3))
        if kv.rank == 1:
            return ""
        with pytest.raises(PeerLost) as caught:
            kv.init(2, torch.zeros(3))
        return str(caught.value)

    text, _ = ranks(2, work)
    assert "lost rank 1 (process exited)" in text


def test_a_call_that_one_worker_does_not_make_is_reported(ranks: Ranks) -> None:
    def work() -> str:
        kv: Any = allstep.kvstore.create("dist_sync")
        text = ""
        if kv.rank == 0:
            parties = kv._values.parties
            usual = parties.limits
            parties.limits = usual._replace(stall=0.4, timeout=1.5)
            with pytest.raises(CollectiveTimeout) as caught:
                kv.init(1, torch.zeros(3))
            parties.limits, text = usual, str(caught.value)
        kv.barrier()
        return text

    first, second = ranks.outcomes(2, work)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert first.result.startswith("kvstore, init: rank 0 waited "), first.result
    assert "allstep: kvstore, init: rank 0 has waited" in first.output


def test_different_calls_are_named(ranks: Ranks) -> None:
    def work() -> None:
        kv = allstep.kvstore.create("dist_sync")
        text = "kvstore: rank 0 calls init and rank 1 calls set_optimizer; all workers make these"
        calls = [
            lambda: kv.init(1, torch.zeros(3)),
            lambda: kv.set_optimizer(torch.optim.SGD, lr=0.1),
        ]
        with pytest.raises(CollectiveMismatch, match=text):
            calls[kv.rank]()

    ranks(2, work)
