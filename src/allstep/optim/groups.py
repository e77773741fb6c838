"""The two parameter groups of a model: parameters that are scaled and decayed, and exempt ones.

The same groups serve the optimizers of this package, which know `exempt`, and torch's own, which
know `weight_decay`:

    LARS(groups(model), lr=8.0, weight_decay=5e-5)
    torch.optim.SGD(groups(model), lr=0.1, weight_decay=5e-4)
    LAMB(groups(model, exempt=lambda name, parameter: "embed" in name or parameter.dim() < 2))
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from allstep.errors import ConfigError

Rule = Callable[[str, nn.Parameter], bool]


def is_exempt(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is exempt by default: biases, and scales and shifts of norms.

    They have one dimension.
    """
    return parameter.dim() < 2


def groups(
    of: nn.Module | Iterable[tuple[str, nn.Parameter]], exempt: Rule = is_exempt
) -> list[dict[str, Any]]:
    """Return parameter groups with names for an optimizer.

    `of`: a model, or its named parameters, or some of them. `exempt`: a function (name, parameter)
    that returns whether a parameter is neither scaled nor decayed (default: `is_exempt`).
    """
    named = list(of.named_parameters() if isinstance(of, nn.Module) else of)
    if not named:
        raise ConfigError(
            "groups: no parameters; give a model that has some, or its named_parameters()"
        )
    exempted = [pair for pair in named if exempt(*pair)]
    names = {name for name, _ in exempted}
    scaled = [pair for pair in named if pair[0] not in names]
    both = _group(scaled, exempt=False), _group(exempted, exempt=True, weight_decay=0.0)
    return [group for group in both if group["params"]]


def _group(named: list[tuple[str, nn.Parameter]], **options: Any) -> dict[str, Any]:
    return {
        "params": [parameter for _, parameter in named],
        "param_names": [name for name, _ in named],
        **options,
    }
