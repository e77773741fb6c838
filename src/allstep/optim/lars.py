"""LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017,
https://arxiv.org/abs/1708.03888).

With large batches the learning rate must grow, and then the layers whose gradients are large
compared with their weights diverge first. So each layer gets its own learning rate, with which a
step is a fixed fraction of its weights. For weights w, gradient g, decay d, trust coefficient eta,
momentum m:

```
ratio = eta * |w| / (|g| + d * |w|)            1 if |w| or the denominator is 0, so that weights
                                               that start at zero can change
v     = m * v + ratio * (g + d * w)            exempt layers: v = m * v + g
w     = w - lr * v                             nesterov: w - lr * (ratio * (g + d * w) + m * v)
```

The paper has the learning rate inside the momentum (v = m * v + lr * ratio * ...). At a constant
learning rate that is the same; when it changes, this form, which is torch's, needs no momentum
correction (Goyal et al. 2017, remark 3; see `scaling_rules`).

Errors of other implementations: scaling and decaying biases and norms as well, which keeps a bias
at zero and pulls scales to zero; no decay in the denominator, so that a layer with small gradients
is decayed far faster than it learns; a ratio of 0 for weights of 0, which then never change;
multiplying the gradient in place, so that its value is lost.

For scaled layers only the product of coefficient and learning rate matters. 0.001 is the paper's,
and its learning rates are far above SGD's; but exempt layers use the learning rate as it is. Scales
and shifts of norms tolerate that, biases of a model without norms do not: give their group its own
learning rate, or use one that suits SGD and a larger coefficient (0.02 to 0.1).
"""

from typing import Any

import torch
from torch import Tensor

from allstep.optim.layerwise import Bundle, Group, LayerWise, Ratios, add_scaled, norms, sign, zeros


class LARS(LayerWise):
    """SGD whose learning rate is scaled layer by layer; see the module.

    `params`: parameters or parameter groups. `lr`: without default, since no single value is right.
    `nesterov`: use Nesterov's momentum. `trust_coefficient`: the fraction of its norm by which a
    step changes a layer at lr=1. `maximize`: ascend instead of descend. `exempt`: whether layers
    are neither scaled nor decayed; None (default): those with fewer than two dimensions.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.001,
        maximize: bool = False,
        exempt: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        more = {"trust_coefficient": trust_coefficient, "maximize": maximize, "exempt": exempt}
        super().__init__(params, defaults | more)

    def _new_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        return {"momentum_buffer": zeros(param)} if group["momentum"] else {}

    def _update(self, bundle: Bundle, group: Group) -> None:
        params, lr, momentum = bundle.params, group["lr"], group["momentum"]
        ratios = None if bundle.exempt else self._ratios_of(bundle, group)
        if not momentum:
            return add_gradient(params, bundle, ratios, group, -lr)
        buffers = bundle.state("momentum_buffer")
        torch._foreach_mul_(buffers, momentum)
        add_gradient(buffers, bundle, ratios, group, 1.0)
        if group["nesterov"]:
            add_gradient(params, bundle, ratios, group, -lr)
        torch._foreach_add_(params, buffers, alpha=-lr * momentum if group["nesterov"] else -lr)
        return None

    def _ratios_of(self, bundle: Bundle, group: Group) -> Tensor:
        weights, denominator = norms(bundle.params), norms(bundle.grads)
        if group["weight_decay"]:
            denominator = denominator + group["weight_decay"] * weights
        scaled = self._bounded(group["trust_coefficient"] * weights / denominator, group)
        ratios = torch.where((weights > 0) & (denominator > 0), scaled, 1.0)
        self._keep(bundle, ratios)
        return ratios

    def _bounded(self, ratios: Tensor, group: Group) -> Tensor:
        """Return the limited ratios (in LARC). The ratio 1 of zero weights has no limit."""
        return ratios


def add_gradient(
    to: list[Tensor], bundle: Bundle, ratios: Ratios, group: Group, alpha: float
) -> None:
    """Compute to += alpha * ratio * (gradient + decay * weight).

    The decay is added first: `to` may be the weights.
    """
    if group["weight_decay"] and not bundle.exempt:
        add_scaled(to, bundle.params, ratios, alpha * group["weight_decay"])
    add_scaled(to, bundle.grads, ratios, alpha * sign(group))
