"""The choice for `precision: auto`: by faked CPU flags, by timing, on several ranks, resumed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import runlog
from allstep.comm.group import agree
from allstep.data import Batch
from allstep.errors import ConfigError
from allstep.machine import Bfloat16
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.config.recipes import RECIPES
from allstep.train.run.loop import train
from allstep.train.step import precision_choice
from allstep.train.step import timing as trying
from allstep.train.step.precision_choice import Settled, check_device, judge, settle, time_both
from allstep.train.step.timing import Trial
from allstep.train.task.classification import Classification
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Opening
from allstep.train.watch.record_callback import Record
from allstep.world import World
from support.batches import batch_of
from support.ranks import Ranks

CPU = torch.device("cpu")
TASK = Classification(4)
NATIVE, EMULATED = frozenset({"avx512_bf16"}), frozenset({"avx2"})
YES, NO, UNKNOWN = (
    Bfloat16(True, "flag x"),
    Bfloat16(False, "no flag"),
    Bfloat16(None, "no flags listed"),
)


def trials(float32: float, bfloat16: float) -> Mapping[str, Trial]:
    return {"float32": Trial(float32), "bfloat16": Trial(bfloat16)}


def never() -> Mapping[str, Trial]:
    raise AssertionError("nothing is timed where the answer is known")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settled]:
    """Call `settle` for a world of one rank with the given judgment of its processor."""
    monkeypatch.setattr(agree, "gather", lambda world, value: [value])

    def settled(
        asked: str, found: Bfloat16, kept: str | None = None, timed: Any = never
    ) -> Settled:
        monkeypatch.setattr(precision_choice, "judge", lambda device: found)
        return settle(asked, kept, World.alone(), CPU, timed)

    return settled


# By flags


def test_every_recipe_and_a_config_without_one_have_auto() -> None:
    assert {make().precision for make in RECIPES.values()} == {"auto"}


def test_flags_decide_where_they_are_known(alone: Callable[..., Settled]) -> None:
    assert alone("auto", YES) == Settled("bfloat16", "flag x")
    assert alone("auto", NO) == Settled("float32", "no flag")


@pytest.mark.parametrize("name", ["float32", "float16", "float64"])
def test_other_precisions_ask_nothing(alone: Callable[..., Settled], name: str) -> None:
    assert alone(name, UNKNOWN) == Settled(name)


def test_the_cpu_is_judged_by_flags_and_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's answer alone is not enough: it is yes for AVX-512 without bfloat16, and no if it is
    limited to AVX2."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(precision_choice, "cpu_flags", lambda: frozenset({"avx512f", "avx512bw"}))
    assert judge(CPU).native is False
    monkeypatch.setattr(precision_choice, "cpu_flags", lambda: NATIVE)
    for supported in (True, False):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=supported: answer
        )
        assert judge(CPU).native is supported
    monkeypatch.setattr(precision_choice, "cpu_flags", lambda: None)
    assert judge(CPU).native is None


@pytest.mark.parametrize(
    ("capability", "native"), [((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_a_gpu_is_judged_by_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = judge(torch.device("cuda", 0))
    assert found.native is native
    assert f"capability {capability[0]}.{capability[1]}" in found.why


def test_a_device_that_has_neither_is_one_line() -> None:
    """The meta device computes nothing, like a GPU for which torch is not built."""
    with pytest.raises(ConfigError) as caught:
        check_device(torch.device("meta"))
    text = str(caught.value)
    assert text.startswith("precision=auto: device meta computes in neither float32 nor bfloat16 (")
    assert "set device=cpu" in text and "\n" not in text
    check_device(CPU)


# By timing


NOW = [0.0]


class Slow(nn.Module):
    """A model that takes a second in one precision and no time in the other.

    It has a clock of its own, because the machine may be suspended for seconds.
    """

    def __init__(self, slow_in_bfloat16: bool) -> None:
        super().__init__()
        self.out, self.norm, self.slow_in_bfloat16 = (
            nn.Linear(12, 5),
            nn.BatchNorm1d(5),
            slow_in_bfloat16,
        )

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") == self.slow_in_bfloat16:
            NOW[0] += 1.0
        found: Tensor = self.norm(self.out(images.flatten(1)))
        return found


def example() -> Batch:
    return batch_of(torch.randn(4, 3, 2, 2), torch.arange(4))


@pytest.mark.parametrize("layout", ["plain", "channels-last", "compiled", "auto"])
@pytest.mark.parametrize(("slow_in_bfloat16", "expected"), [(True, "float32"), (False, "bfloat16")])
def test_the_faster_one_is_kept_where_flags_are_unknown(
    alone: Callable[..., Settled],
    slow_in_bfloat16: bool,
    expected: str,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))
    model = Slow(slow_in_bfloat16)
    given, before = example(), {name: each.clone() for name, each in model.state_dict().items()}
    drawn = torch.get_rng_state()
    settled = alone(
        "auto", UNKNOWN, None, lambda: time_both(model, given, TASK, World.alone(), layout)
    )
    assert settled.name == expected
    times = (
        "float32 0 ms, bfloat16 1,000 ms" if slow_in_bfloat16 else "float32 1,000 ms, bfloat16 0 ms"
    )
    assert settled.why == f"no flags listed; a step takes {times}"
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model.out.weight.grad is None
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_gain_within_noise_is_none(alone: Callable[..., Settled]) -> None:
    assert alone("auto", UNKNOWN, None, lambda: trials(1.0, 0.99)).name == "float32"
    assert alone("auto", UNKNOWN, None, lambda: trials(1.0, 0.9)).name == "bfloat16"


def test_a_model_that_fails_in_both_fails_later(alone: Callable[..., Settled]) -> None:
    failed = {"float32": Trial(why_not="no"), "bfloat16": Trial(why_not="no")}
    assert alone("auto", UNKNOWN, None, lambda: failed).name == "float32"


def test_a_model_that_cannot_be_channels_last_is_timed_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agree, "gather", lambda world, value: [value])

    class ByView(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(images).view(len(images), -1)

    found = time_both(
        ByView(),
        batch_of(torch.randn(4, 3, 6, 6), torch.arange(4)),
        TASK,
        World.alone(),
        "channels-last",
    )
    assert all(trial.works for trial in found.values())


def test_an_emulated_bfloat16_gets_its_factor(alone: Callable[..., Settled]) -> None:
    settled = alone("bfloat16", NO, None, lambda: trials(0.1, 1.07))
    assert (settled.name, settled.why) == ("bfloat16", "")
    (note,) = settled.notes
    assert (
        note
        == "bfloat16 is emulated: no flag; a step takes 11 times as long as in float32 (float32 100"
        " ms, bfloat16 1,070 ms): precision=auto or precision=float32 is faster"
    )
    assert alone("bfloat16", YES).notes == ()
    assert alone("bfloat16", NO, None, lambda: trials(1.0, 0.9)).notes == ()
    broken = {"float32": Trial(why_not="no"), "bfloat16": Trial(why_not="no")}
    assert alone("bfloat16", NO, None, lambda: broken).notes == (
        "bfloat16 is emulated: no flag; precision=float32 may be faster",
    )


# In a run


SHORT = ["epochs=2", "data.validation=100", "save.seconds=null", "batch=200", "log_every=1"]


class Opened(Callback):
    """A callback that keeps the opening event of a run."""

    opening: Opening

    def start(self, opening: Opening) -> None:
        self.opening = opening


def run(
    out: Path,
    flags: Mapping[int, frozenset[str] | None],
    overrides: list[str],
    resume: bool = False,
) -> Any:
    """Train a run whose ranks have CPUs with these flags. Return its opening and this rank's
    precision."""
    world = allstep.init()
    precision_choice.cpu_flags = lambda: flags[world.rank]  # type: ignore[assignment]
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: True
    opened = Opened()
    snapshot = checkpoint.newest(out / "checkpoints").snapshot if resume else None
    callbacks = [opened, Record(runlog.RunLog(out / "run.jsonl"))] if world.rank == 0 else [opened]
    result = train(
        read_config("digits", [*SHORT, *overrides]), world, out, callbacks, snapshot=snapshot
    )
    return (
        opened.opening.precision,
        opened.opening.precision_why,
        opened.opening.notes,
        result.test.loss,
    )


LIMITS = {"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "", "ATEN_CPU_CAPABILITY": ""}


def test_a_run_records_its_precision_and_keeps_it(ranks: Ranks, tmp_path: Path) -> None:
    """Started on a CPU with bfloat16, resumed on one without: the same result as uninterrupted."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    (wanted,) = ranks(1, run, whole, {0: NATIVE}, [], env=LIMITS)
    ((name, why, notes, _),) = ranks(1, run, out, {0: NATIVE}, [], env=LIMITS)
    assert (name, why, notes) == ("bfloat16", "this CPU computes in it, flag avx512_bf16", ())
    start = runlog.read(out / "run.jsonl").start
    assert (start["config"]["precision"], start["precision"], start["precision_why"]) == (
        "auto",
        name,
        why,
    )
    last, first = checkpoint.written(out / "checkpoints")
    assert json.loads((last / "state.json").read_text())["precision"]["name"] == "bfloat16"
    checkpoint.remove(last)
    assert first.exists()
    ((name, why, notes, loss),) = ranks(1, run, out, {0: EMULATED}, [], True, env=LIMITS)
    assert (name, why) == ("bfloat16", "kept from the start of the run")
    (note,) = notes
    assert note.startswith(
        "precision bfloat16 is kept from the start of the run; a new run would use float32 here: "
    )
    assert loss == wanted[3]
    assert runlog.read(out / "run.jsonl").starts[-1]["precision"] == "bfloat16"


def test_ranks_agree_on_float32_when_one_lacks_bfloat16(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(
        2, run, tmp_path / "run", {0: NATIVE, 1: EMULATED}, [], hosts=["a", "b"], env=LIMITS
    )
    assert [name for name, *_ in found] == ["float32", "float32"]
    assert found[0][1].startswith("on b: this CPU has no bfloat16 arithmetic")


def test_ranks_time_together_when_one_does_not_know(ranks: Ranks, tmp_path: Path) -> None:
    """Any result, but the same on both ranks."""
    (first, why, *_), (second, *_) = ranks(
        2, run, tmp_path / "run", {0: NATIVE, 1: None}, ["model.norm=sync"], env=LIMITS
    )
    assert first == second
    assert "the kernel lists no CPU flags; a step takes float32 " in why


def test_a_checkpoint_from_before_has_no_name(ranks: Ranks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = ["precision=bfloat16"]
    (wanted,) = ranks(1, run, out, {0: NATIVE}, overrides, env=LIMITS)
    last, first = checkpoint.written(out / "checkpoints")
    checkpoint.remove(last)
    old = checkpoint.read(first)
    state = {**old.state, "precision": {"scale": 1.0, "steps_since": 0}}
    checkpoint.write(
        out / "checkpoints", checkpoint.Snapshot(old.samples, old.weights, old.optimizer, state)
    )
    ((name, why, _, loss),) = ranks(1, run, out, {0: NATIVE}, overrides, True, env=LIMITS)
    assert (name, why, loss) == ("bfloat16", "", wanted[3])


def test_an_explicit_bfloat16_is_never_replaced(ranks: Ranks, tmp_path: Path) -> None:
    ((name, why, _, _),) = ranks(
        1, run, tmp_path / "run", {0: EMULATED}, ["precision=bfloat16"], env=LIMITS
    )
    assert (name, why) == ("bfloat16", "")
