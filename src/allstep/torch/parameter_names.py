"""The names by which ranks match parameters, and Horovod's checks of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from allstep.parallel.exchange import Named


def check_names(optimizer: Optimizer, given: Iterable[tuple[str, Parameter]] | None) -> list[Named]:
    """Return every parameter of the optimizer with its name, in the optimizer's order.

    Without given names the parameters are numbered.
    """
    names = _numbered(optimizer) if given is None else _given(list(given))
    found = {}
    missing = []
    for parameter in parameters_of(optimizer):
        name = names.get(id(parameter))
        if name is None:
            missing.append(list(parameter.shape))
        else:
            found[id(parameter)] = Named(name, parameter)
    if missing:
        raise ValueError(
            f"named_parameters names {len(names)} parameters, but {len(missing)} of the optimizer's"
            f" are not among them (shapes {', '.join(map(str, missing[:5]))}): pass"
            " model.named_parameters() of all models that it optimizes"
        )
    return list(found.values())


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _numbered(optimizer: Optimizer) -> dict[int, str]:
    return {
        id(parameter): f"allreduce.noname.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }


def _given(given: list[Any]) -> dict[int, str]:
    if any(not isinstance(each, tuple) for each in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), such as"
            " model.named_parameters()"
        )
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"named_parameters has duplicate names: {', '.join(twice)}. Names must be unique"
        )
    return {id(parameter): name for name, parameter in given}


def split_groups(
    named: Sequence[Named], groups: int | Sequence[Sequence[Tensor]] | None
) -> list[list[Parameter]] | None:
    """Return Horovod's groups of parameters; parameters in no group are reduced separately.

    `groups`: the number of groups, in the order of the parameters, or lists of parameters.
    """
    if groups is None:
        return None
    if isinstance(groups, (list, tuple)):
        return _listed(groups)
    if not isinstance(groups, int) or groups <= 0:
        raise ValueError(
            f"groups={groups!r}: expected a number above 0 or a list of lists of parameters"
        )
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    each, more = divmod(len(parameters), groups)
    bounds = [i * each + min(i, more) for i in range(groups + 1)]
    return [parameters[start:end] for start, end in pairwise(bounds) if end > start]


def _listed(groups: Sequence[Sequence[Tensor]]) -> list[list[Parameter]]:
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"groups must be lists of parameters, not of {type(parameter).__name__}"
                )
            if id(parameter) in seen:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is in two groups, or twice"
                    " in one"
                )
            seen.add(id(parameter))
    return [
        [parameter for parameter in group if isinstance(parameter, Parameter)] for group in groups
    ]
