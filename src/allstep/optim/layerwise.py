"""The common part of the layer-wise optimizers: LARS, LARC, LAMB and NovoGrad each scale a layer's
step by norms of that layer.

A layer is a parameter tensor. A step processes bundles instead of tensors:

```
group["params"] -> those with a gradient -> bundles of the same device, dtype, step count and
                                            exemption
                                            | params  | grads | states |
                                            one torch._foreach_* call for all of a bundle
```

So all norms of a bundle take one call, ratios are one small tensor, and nothing is read back from
the device. The ratios of the last step are kept as that tensor; `trust_ratios()` converts them to
numbers.

**Exempt** tensors are neither scaled nor decayed: by default those with fewer than two dimensions,
which are the biases and the scales and shifts of norms. Their norms have no meaning for a layer (a
bias starts at zero, a scale at one), and decaying them to zero is useless. The option `exempt` of a
parameter group overrides this: True exempts all of the group, False none; `groups` makes such
groups by name.

**Half precision.** State is stored in the type of the parameter, as in torch, but norms, ratios and
what is scaled by them are computed in float32, and a state named in `exact_state` is stored in
float32: squares exceed float16 at both ends, and a mean in bfloat16 that should shrink by a
thousandth does not. torch's `load_state_dict` casts all state to the type of its parameter, so such
a state is restored from the given one.

Under `DistributedOptimizer(share_weights=True)` each rank updates whole tensors (`elementwise =
False`), so that norms are right. All state is stored by tensor, none in the groups, because a rank
has the groups of all tensors and the state of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from allstep.errors import ConfigError

Group = Mapping[str, Any]
Ratios = Tensor | None


class Bundle(NamedTuple):
    """Tensors that are updated together, by one call for all."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    exempt: bool

    def state(self, name: str) -> list[Tensor]:
        """Return the state of this name for each tensor."""
        return [state[name] for state in self.states]


class LayerWise(Optimizer):
    """The base of optimizers that use norms of whole layers.

    A subclass implements `_new_state` and `_update`.
    """

    elementwise = False
    exact_state: tuple[str, ...] = ()
    """States that are stored in float32 if the parameter has fewer bits."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._ratios: list[tuple[list[Tensor], Tensor]] = []
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The list stays the same object: load_state_dict also calls this, and with shared weights
        # two optimizers hold it.
        self.__dict__.setdefault("_ratios", []).clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict()`, perhaps for parameters of another type."""
        given: list[dict[str, Any]] = []
        # This hook runs last, so it sees the changes of other hooks.
        last = self.register_load_state_dict_pre_hook(lambda _, each: given.append(each))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        self._put_back_exact(given[0])

    def _put_back_exact(self, given: dict[str, Any]) -> None:
        """Restore the states that torch has cast to the type of the parameter."""
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            values = given["state"].get(number, {})
            for name in self.exact_state:
                if name in values:
                    self.state[param][name] = values[name].to(
                        device=param.device, dtype=exact(param.dtype)
                    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; raise ConfigError for invalid options."""
        super().add_param_group(param_group)
        problem = _problem(self.param_groups[-1])
        if problem:
            self.param_groups.pop()
            raise ConfigError(f"{type(self).__name__}: {problem}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients.

        `closure`: computes the loss again, with gradients, and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ratios.clear()
        work = [(group, bundle) for group in self.param_groups for bundle in self._bundles(group)]
        self._check_some(bool(work))
        for group, bundle in work:
            self._update(bundle, group)
        return loss

    def trust_ratios(self) -> dict[str | int, float]:
        """Return the factor by which the last step scaled each layer, by name.

        By number without names. Exempt layers have none. Names are known if the optimizer was given
        `model.named_parameters()` (torch 2.6 and later) or `groups(model)`. With
        `DistributedOptimizer(share_weights=True)` all ranks call it together, and rank 0 gets those
        of all layers.
        """
        found = {
            tensor.data_ptr(): ratio
            for tensors, ratios in self._ratios
            for tensor, ratio in zip(tensors, ratios.tolist(), strict=True)
        }
        return {name: found[place] for name, place in self._places() if place in found}

    def _places(self) -> Iterator[tuple[str | int, int]]:
        """Return name and address of each parameter.

        With shared weights the tensors that were updated are other objects at the same address.
        """
        number = 0
        for group in self.param_groups:
            names = group.get("param_names") or range(number, number + len(group["params"]))
            yield from zip(names, (tensor.data_ptr() for tensor in group["params"]), strict=True)
            number += len(group["params"])

    def _bundles(self, group: Group) -> list[Bundle]:
        """Return the tensors of a group that have a gradient, grouped for common calls."""
        bundles: dict[Any, Bundle] = {}
        rule = group["exempt"]
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state.update(self._new_state(param, group))
            exempt = param.dim() < 2 if rule is None else bool(rule)
            key = param.device, param.dtype, exempt, state.get("step")
            bundle = bundles.setdefault(key, Bundle([], [], [], exempt))
            bundle.params.append(param)
            bundle.grads.append(self._dense(param.grad))
            bundle.states.append(state)
        return list(bundles.values())

    def _dense(self, grad: Tensor) -> Tensor:
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"{type(self).__name__} needs dense gradients, and one of shape {list(grad.shape)}"
                f" is {grad.layout}: the norm of a layer needs all of it. Make the layer with"
                " sparse=False, or give it an optimizer of its own"
            )
        return grad

    def _check_some(self, some: bool) -> None:
        """Raise ConfigError if no parameter has a gradient.

        A rank's ranges of shared weights require no gradient; they may be empty or unused.
        """
        if not some and any(
            param.requires_grad for group in self.param_groups for param in group["params"]
        ):
            count = sum(len(group["params"]) for group in self.param_groups)
            raise ConfigError(
                f"{type(self).__name__}.step(): none of {count} parameters has a gradient; call"
                " loss.backward() before it, and zero_grad() before that"
            )

    def _keep(self, bundle: Bundle, ratios: Tensor) -> None:
        """Store the ratios for `trust_ratios`."""
        self._ratios.append((bundle.params, ratios))

    def _new_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        """Return the state of a tensor before its first step."""
        raise NotImplementedError

    def _update(self, bundle: Bundle, group: Group) -> None:
        """Make one step for these tensors."""
        raise NotImplementedError


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, as one tensor.

    For half precision in float32, in which the squares do not overflow.
    """
    own = tensors[0].dtype
    return torch.stack(
        torch._foreach_norm(tensors, 2, dtype=None if exact(own) == own else exact(own))
    )


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which norms of tensors of this type are computed."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def add_scaled(to: list[Tensor], tensors: list[Tensor], ratios: Ratios, alpha: float) -> None:
    """Compute to += alpha * ratio * tensors, each with its own ratio; 1 without ratios."""
    if ratios is None:
        torch._foreach_add_(to, tensors, alpha=alpha)
    elif ratios.dtype == to[0].dtype:
        torch._foreach_addcmul_(to, tensors, list(ratios.unbind()), value=alpha)
    else:
        # The maximum of float16 is 65504, and ratios of small gradients are larger.
        scaled = torch._foreach_mul(
            [tensor.to(ratios.dtype) for tensor in tensors], list(ratios.unbind())
        )
        torch._foreach_add_(to, list(scaled), alpha=alpha)


def zeros(param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros for a state with a value for each element, in the parameter's layout.

    `dtype`: None is the parameter's.
    """
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def sign(group: Group) -> float:
    """Return the sign of a gradient: -1 to maximize, else 1."""
    return -1.0 if group["maximize"] else 1.0


_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda value: 0 <= value < float("inf"), "0 or more"),
    "weight_decay": (lambda value: 0 <= value < float("inf"), "0 or more"),
    "momentum": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "trust_coefficient": (lambda value: 0 < value < float("inf"), "above 0"),
    "eps": (lambda value: 0 <= value < float("inf"), "0 or more"),
}


def _problem(group: Group) -> str | None:
    """Describe what is wrong with a group's options; None if they are valid."""
    for name, (fits, expected) in _RANGES.items():
        if name in group and (isinstance(group[name], Tensor) or not fits(group[name])):
            return f"{name}={group[name]!r} should be a number, {expected}"
    betas = group.get("betas", ())
    if any(not 0 <= beta < 1 for beta in betas):
        return f"betas={betas!r} should be from 0 to below 1"
    if group.get("nesterov") and not group["momentum"]:
        return "nesterov=True needs a momentum above 0"
    for param in group["params"]:
        if param.is_complex():
            return (
                f"a parameter of shape {list(param.shape)} is {param.dtype}; give"
                " torch.view_as_real of it instead"
            )
    return None
