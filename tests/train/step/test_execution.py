"""Execution modes: choices by given times; compiling with the real compiler, and without one."""

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import allstep
from allstep.data import Batch
from allstep.norm import convert
from allstep.train.step import execution
from allstep.train.step.execution import Chosen, applied, choose, decide, settle
from allstep.train.step.timing import Trial, reason
from support.batches import batch_of
from support.ranks import Ranks


class Small(nn.Module):
    def __init__(self, by_view: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(4 * 36, 5)
        self.by_view = by_view

    def forward(self, images: Tensor) -> Tensor:
        maps = self.drop(self.norm(self.conv(images)))
        return self.out(maps.view(len(maps), -1) if self.by_view else maps.flatten(1))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch.data), batch.target)


def example() -> Batch:
    return batch_of(torch.randn(6, 3, 8, 8), torch.arange(6) % 5)


def trials(**seconds: float) -> dict[str, Trial]:
    return {name.replace("_", "-"): Trial(value) for name, value in seconds.items()}


@pytest.mark.parametrize(
    ("steps", "cost", "expected"),
    [
        (math.inf, 60, "compiled"),
        (10_000, 60, "compiled"),
        (1000, 60, "channels-last"),
        (1000, 1, "compiled"),
    ],
)
def test_compiling_must_pay_for_itself(steps: float, cost: float, expected: str) -> None:
    """It saves 0.1 s a step, and its cost counts three times."""
    found = {**trials(plain=0.5, channels_last=0.3), "compiled": Trial(0.2, cost)}
    assert decide(found, steps) == expected


def test_less_than_noise_changes_nothing_and_failures_are_left_out() -> None:
    assert decide(trials(plain=0.1, channels_last=0.099), math.inf) == "plain"
    assert decide(trials(plain=0.1, channels_last=0.09), math.inf) == "channels-last"
    failed = Trial(why_not="no")
    assert decide({"plain": failed, **trials(channels_last=0.2)}, math.inf) == "channels-last"
    assert decide({"plain": failed, "compiled": failed}, math.inf) == "plain"


def test_applied_keeps_names_and_values() -> None:
    model = Small()
    model.more = nn.Conv3d(1, 1, 2)  # torch's own conversion refuses five dimensions
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for way, is_last in (("channels-last", True), ("plain", False)):
        assert applied(model, way) is model
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last) == is_last
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="'fast' is not one of plain, channels-last, compiled"):
        applied(model, "fast")


def test_reasons_are_one_line() -> None:
    assert reason(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert reason(KeyError()) == "KeyError: no message"
    assert len(reason(RuntimeError("x" * 999))) == 200


def without_model(chosen: Chosen) -> dict[str, Any]:
    return {"name": chosen.name, "seconds": dict(chosen.seconds), "notes": chosen.notes}


def choose_untouched(ways: tuple[str, ...], by_view: bool, sync: bool) -> dict[str, Any]:
    """Call `choose`, and return its result with what it must not change."""
    world = allstep.init()
    torch.manual_seed(0)
    model = convert(Small(by_view), sync=True) if sync else Small(by_view)
    images = example()
    before, state = (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        torch.get_rng_state(),
    )
    chosen = choose(model, images, loss_of, world, ways, steps=2, remaining_steps=100)
    assert chosen.model is model
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model, images).backward()
    return without_model(chosen)


def test_ranks_choose_together(ranks: Ranks) -> None:
    first, second = ranks(2, choose_untouched, ("plain", "channels-last"), False, False)
    assert first == second
    assert first["seconds"].keys() == {"plain", "channels-last"}
    (note,) = first["notes"]
    assert note.startswith(f"execution {first['name']}: a step takes plain ")
    assert note.endswith("; 100 steps are left")


def test_a_model_that_cannot_be_channels_last(ranks: Ranks) -> None:
    (found,) = ranks(1, choose_untouched, ("channels-last", "plain"), True, False)
    assert found["name"] == "plain"
    assert found["notes"][1].startswith(
        "execution channels-last is not used: RuntimeError: view size is not compatible"
    )


def test_norms_that_communicate_are_not_compiled(ranks: Ranks) -> None:
    for found in ranks(2, choose_untouched, ("plain", "compiled"), False, True):
        assert found["name"] == "plain"
        assert (
            found["notes"][1]
            == "execution compiled is not used: its norms communicate with other ranks, which"
            " cannot be compiled"
        )


def choose_without_sense() -> str:
    world = allstep.init()
    given = example()
    wrong = replace(given, target=given.target + 7)
    try:
        choose(Small(), wrong, loss_of, world, ("plain", "channels-last"))
    except IndexError as error:
        return str(error)
    return ""


def test_what_fails_in_every_way_is_an_error(ranks: Ranks) -> None:
    assert ranks(1, choose_without_sense) == ["Target 7 is out of bounds."]


def settle_on(name: str, by_view: bool = False) -> dict[str, Any]:
    world = allstep.init()
    model = Small(by_view)
    chosen = settle(model, example(), loss_of, world, name)
    loss_of(chosen.model, example()).backward()
    return without_model(chosen)


def test_a_fixed_way_falls_back(ranks: Ranks) -> None:
    assert ranks(1, settle_on, "channels-last") == [
        {"name": "channels-last", "seconds": {}, "notes": ()}
    ]
    assert ranks(1, settle_on, "plain", True)[0]["name"] == "plain"
    (found,) = ranks(1, settle_on, "channels-last", True)
    assert found["name"] == "plain"
    assert found["notes"][0].startswith(
        "execution channels-last is not used: RuntimeError: view size"
    )


COMPILER = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}  # what takes long and is torch's matter


def both_without_a_compiler() -> tuple[dict[str, Any], dict[str, Any]]:
    return settle_on("compiled"), choose_untouched(("plain", "compiled"), False, False)


def test_without_a_compiler(ranks: Ranks, tmp_path: Path) -> None:
    env = {**COMPILER, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    note = "execution compiled is not used: there is no C++ compiler; install g++, or set CXX"
    ((settled, chosen),) = ranks(1, both_without_a_compiler, env=env)
    assert settled == {"name": "channels-last", "seconds": {}, "notes": (note,)}
    assert chosen["name"] == "plain"
    assert chosen["notes"][1] == note


def compiled_like_plain() -> tuple[dict[str, Any], int]:
    """Compile a Sequential, for which torch's own Module.compile() does nothing."""
    world = allstep.init()
    model, images = (
        nn.Sequential(nn.Linear(8, 4), nn.Tanh()),
        batch_of(torch.randn(6, 8), torch.arange(6) % 4),
    )
    names = list(model.state_dict())
    expected = torch.autograd.grad(loss_of(model, images), list(model.parameters()))
    chosen = settle(model, images, loss_of, world, "compiled")
    assert list(model.state_dict()) == names
    found = torch.autograd.grad(loss_of(model, images), list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    return without_model(chosen), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.timeout(600)
def test_compiled_it_computes_the_same(ranks: Ranks, tmp_path: Path) -> None:
    env = {**COMPILER, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ((found, num_graphs),) = ranks(1, compiled_like_plain, env=env, timeout=500)
    assert found == {"name": "compiled", "seconds": {}, "notes": ()}
    assert num_graphs > 0


def test_weights_of_one_channel_are_laid_out_too() -> None:
    """Both formats have the same memory there, but torch chooses its kernels by the strides."""
    model = nn.Conv2d(1, 4, 3)
    expected = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last).weight.stride()  # type: ignore[call-overload]
    assert applied(model, "channels-last").weight.stride() == expected == (9, 1, 3, 1)
    assert applied(model, "plain").weight.stride() == (9, 9, 3, 1)


def test_compiled_code_is_kept_where_no_other_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch executes the files that it finds in this folder."""
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    for expected in (tmp_path / "cache" / "compiled", None):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        execution._keep_compiled_code_private()
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.getuid()
        if expected is None:
            assert not folder.is_relative_to(tmp_path)
            folder.rmdir()
        else:
            assert folder == expected
            folder.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    execution._keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
