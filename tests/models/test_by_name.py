"""Nets by name against the factories called by hand, users' factories, and one line for each thing
that can be wrong."""

import inspect
import math
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep.errors import ConfigError
from allstep.models import (
    NAMES,
    CifarResNet,
    SmallCnn,
    check_name,
    check_shape,
    make_model,
    make_norm,
    resnet18,
)
from allstep.models.by_name import GIVEN, check_options
from allstep.models.norms import batch_norm, no_norm

MINE = """
import torch
from torch import nn

def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

def with_shape(num_classes, shape, hidden=8, *, norm):
    return nn.Sequential(norm(shape[0]), nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], hidden), nn.Linear(hidden, num_classes))

def passes_on(**named):
    return plain(**named)

def needs_depth(num_classes, depth):
    return plain(num_classes)

def breaks(num_classes):
    raise OSError("no such weights:\\n  here.pt")

def no_net(num_classes):
    return [num_classes]

class Pair(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.inner = plain(num_classes)

    def forward(self, x):
        return self.inner(x), x

def sharp(num_classes):
    return nn.Conv2d(7, num_classes, 3)

def too_few(num_classes):
    return plain(num_classes - 1)

number = 3
"""


def test_the_options_are_those_of_the_factories() -> None:
    for name, model in NAMES.items():
        home, _, factory = model.home.partition(":")
        takes = inspect.signature(
            getattr(import_module(f"allstep.models.{home}"), factory)
        ).parameters
        assert set(model.options) == takes.keys() - {*GIVEN, *model.settled}, name
        check_options(name, {})
        with pytest.raises(ConfigError, match=f"model {name} has no option 'colour'; known are: "):
            check_options(name, {"colour": 1})
        with pytest.raises(
            ConfigError, match=r"model\.options\.norm: it is set by model\.norm, leave it out"
        ):
            check_options(name, {"norm": 1})
    check_options("somebody.s:net", {"colour": 1})


def test_defaults_of_the_factories_pass_their_checks() -> None:
    for name, model in NAMES.items():
        home, _, factory = model.home.partition(":")
        takes = inspect.signature(
            getattr(import_module(f"allstep.models.{home}"), factory)
        ).parameters
        check_options(name, {key: takes[key].default for key in model.options})


ODD_VALUES: Mapping[str, list[Any]] = {
    "widths": [[0], [-1, 8], [8, 1 << 30], [1.5, 8], [True, 8], 8, "8", None, [8] * 1000, {"8": 8}],
    "hidden": [0, -1, 1 << 40, 1.5, True, "8", None],
    "dropout": [-0.1, 1.1, math.nan, math.inf, True, "0.5", None],
    "depth": [0, -2, 4, 10**9, 16.0, True, None],
    "widen": [0, -1, 10**6, 1.5, True],
    "scale": [0, -1.0, math.nan, math.inf, 1e300, "1", None],
    "zero_last_norm": [0, 1, "yes", None],
    "skip": [0, 1, "no", None],
    "small_pictures": [0, 1, "yes", None],
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_odd_values_of_options_are_one_line(name: str) -> None:
    """None is left to torch, which accepts zero channels and fails in the first step."""
    for key in NAMES[name].options:
        for value in ODD_VALUES[key]:
            with pytest.raises(
                ConfigError, match=rf"^config key 'model.options.{key}': expected .*, found "
            ) as caught:
                make_model(
                    name, num_classes=2, shape=(3, 64, 64), norm=no_norm, options={key: value}
                )
            assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("small-cnn", {"widths": [1], "hidden": 1}),
        ("small-cnn", {"widths": []}),
        ("lenet", {"widths": [1, 1], "hidden": 1, "dropout": 1}),
        ("speedy", {"widths": [1, 1, 1], "scale": 1e-6}),
        ("wide-resnet", {"depth": 10, "widen": 1, "dropout": 1.0}),
    ],
)
def test_the_smallest_values_can_be_trained(name: str, options: dict[str, Any]) -> None:
    model = make_model(name, num_classes=2, shape=(3, 16, 16), norm=batch_norm(), options=options)
    model(torch.randn(4, 3, 16, 16)).sum().backward()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with modules of a user's, which is the current one."""
    (tmp_path / "own_nets.py").write_text(MINE)
    (tmp_path / "wrong_nets.py").write_text("import no_such_package\n")
    (tmp_path / "bad_nets.py").write_text("def net(:\n")
    monkeypatch.chdir(tmp_path)
    for name in ("own_nets", "wrong_nets", "bad_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def made(name: str, shape: tuple[int, int, int] = (3, 8, 8), **options: Any) -> nn.Module:
    return make_model(name, num_classes=10, shape=shape, norm=make_norm("batch"), options=options)


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("channels", [1, 3])
def test_each_name_takes_the_smallest_images_it_says_and_no_smaller_ones(
    name: str, channels: int
) -> None:
    side = NAMES[name].smallest
    with torch.device("meta"):
        model = make_model(
            name, num_classes=7, shape=(channels, side, side), norm=no_norm, options={}
        )
        assert model(torch.empty(2, channels, side, side)).shape == (2, 7)
    if side > 1:
        with pytest.raises(
            ConfigError,
            match=rf"{name}: expected images of at least {side}x{side} pixels.*{side - 1}x",
        ):
            check_shape(name, (channels, side - 1, 2 * side))
        # The limit is not larger than need be.
        with torch.device("meta"), pytest.raises(Exception):  # noqa: B017
            model(torch.empty(2, channels, side - 1, side - 1))


def test_a_net_by_name_is_the_factory_called_by_hand() -> None:
    for name, options, by_hand in (
        (
            "resnet18",
            {"small_pictures": True, "zero_last_norm": True},
            lambda: resnet18(10, small_pictures=True),
        ),
        ("cifar-resnet56", {}, lambda: CifarResNet(56, 10)),
        (
            "small-cnn",
            {"widths": [4, 6], "hidden": 9},
            lambda: SmallCnn(10, (3, 8, 8), widths=(4, 6), hidden=9),
        ),
    ):
        with torch.device("meta"):
            theirs = by_hand()
            ours = make_model(
                name, num_classes=10, shape=(3, 8, 8), norm=batch_norm(), options=options
            )
        shapes = [each.shape for each in ours.parameters() if each.ndim > 1]
        assert shapes == [each.shape for each in theirs.parameters() if each.ndim > 1]


def test_the_last_norm_of_a_block_starts_at_zero_if_asked() -> None:
    model = made("cifar-resnet20", zero_last_norm=True)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert sum(not norm.weight.any() for norm in norms) == 9
    with pytest.raises(ConfigError, match="would stay at zero"):
        make_model(
            "cifar-resnet20",
            num_classes=10,
            shape=(3, 8, 8),
            norm=make_norm("batch", scale=False),
            options={"zero_last_norm": True},
        )


def test_norms_by_name() -> None:
    norm = make_norm("batch", momentum=0.3, scale=False)(5)
    assert isinstance(norm, nn.BatchNorm2d)
    assert (norm.momentum, norm.eps, norm.num_features) == (0.3, 1e-5, 5)
    assert (
        not norm.weight.requires_grad and norm.bias.requires_grad and bool((norm.weight == 1).all())
    )
    assert isinstance(make_norm("group")(6), nn.GroupNorm)
    assert isinstance(make_norm("none")(6), nn.Identity)
    with pytest.raises(ConfigError, match="did you mean 'group'"):
        make_norm("grup")


@pytest.mark.usefixtures("mine")
def test_a_users_factory_gets_what_it_takes() -> None:
    before = list(sys.path)
    assert made("own_nets:plain")(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    model = made("own_nets:with_shape", hidden=5)
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], nn.BatchNorm2d)
    assert model[2].out_features == 5  # type: ignore[union-attr]
    assert made("own_nets:passes_on")(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    assert sys.path == before


@pytest.mark.usefixtures("mine")
def test_trying_a_net_changes_nothing() -> None:
    torch.manual_seed(3)
    model = made("own_nets:with_shape")
    after = torch.rand(1)
    torch.manual_seed(3)
    import own_nets  # type: ignore[import-not-found]

    same = own_nets.with_shape(10, (3, 8, 8), norm=make_norm("batch"))
    assert torch.equal(after, torch.rand(1))
    assert model.training
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True)
    )


WRONG: list[tuple[str, Mapping[str, Any], str]] = [
    ("resnet51", {}, "no model is called 'resnet51' .*did you mean 'resnet50'"),
    (
        "lenet",
        {"hiden": 3},
        (
            "model lenet has no option 'hiden'; did you mean 'hidden'. known are: dropout, hidden,"
            " widths"
        ),
    ),
    ("cifar-resnet20", {"depth": 8}, "model.options.depth: the model's name sets it to 20"),
    ("lenet", {"norm": "batch"}, "model.options.norm: it is set by model.norm"),
    ("lenet", {"num_classes": 3}, "model.options.num_classes: it is set by the data"),
    ("wide-resnet", {"depth": 17}, "model wide-resnet: depth 17: this model has 6n[+]4 layers"),
    ("lenet", {"dropout": 7}, "model.options.dropout.: expected a number from 0 to 1, found 7"),
    ("own nets:plain", {}, "expected package.module:factory"),
    ("own_nets:", {}, "expected package.module:factory"),
    ("ownnets:plain", {}, "no module 'ownnets' in"),
    ("own_nets.deeper:plain", {}, "own_nets.deeper"),
    ("own_nets:plane", {}, "own_nets has no 'plane'; did you mean 'plain'"),
    ("own_nets:number", {}, "it is an int, expected a function or class"),
    ("own_nets:needs_depth", {}, "needs the option 'depth': model.options.depth="),
    ("own_nets:plain", {"depth": 3}, "has no option 'depth'; it has none"),
    (
        "own_nets:breaks",
        {},
        r"the factory raised OSError: no such weights: here.pt \(own_nets.py, line 18\)",
    ),
    ("own_nets:no_net", {}, "the factory returned a list, expected a torch.nn.Module"),
    ("own_nets:Pair", {}, r"it returned a tuple, expected one tensor of logits \(n, 10\)"),
    ("own_nets:sharp", {}, "it cannot take an image of 3 x 8 x 8: RuntimeError"),
    ("own_nets:too_few", {}, r"logits of shape \(1, 9\), expected \(1, 10\)"),
    (
        "wrong_nets:net",
        {},
        "importing wrong_nets failed: ModuleNotFoundError: No module named 'no_such_package'",
    ),
    ("bad_nets:net", {}, r"importing bad_nets failed: SyntaxError: .*bad_nets.py, line 1\)"),
]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "options", "words"), WRONG, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)]
)
def test_what_is_wrong_is_one_line(name: str, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        made(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("processes")
def test_a_name_is_checked_without_torch() -> None:
    code = (
        "import sys\nfrom allstep.models import NAMES, check_name,"
        " check_shape\ncheck_name('speedy'); check_name('yaml:load'); check_shape('vgg16', (3, 32,"
        " 32))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    with pytest.raises(ConfigError, match="known are"):
        check_name("something-else-entirely")
