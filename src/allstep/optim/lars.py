"""LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017,
https://arxiv.org/abs/1708.03888).

With large batches the rate must grow, and then the layers whose gradients are large beside their
weights diverge first. So each layer gets a rate of its own, by which a step is a set fraction of
its weights. For weights w, gradient g, decay d, trust coefficient eta, momentum m:

```
ratio = eta * |w| / (|g| + d * |w|)            1 where |w| or the denominator is 0, so that weights that start at zero can leave it
v     = m * v + ratio * (g + d * w)            exempt layers: v = m * v + g
w     = w - lr * v                             nesterov: w - lr * (ratio * (g + d * w) + m * v)
```

The paper has the rate inside the momentum (v = m * v + lr * ratio * ...). At a constant rate that
is the same; when the rate changes, this form, which is torch's, needs no momentum correction (Goyal
et al. 2017, remark 3; see `scaling`).

What others got wrong: scaling and decaying biases and norms as well, which stops a bias at zero and
pulls scales to zero; leaving the decay out of the denominator, so that a layer with small gradients
is decayed far faster than it learns; a ratio of 0 for weights of 0, which then stay there;
multiplying the gradient in place, so that nobody can look at it afterwards.

For scaled layers only the product of coefficient and rate counts. 0.001 is the paper's, and the
rates that go with it are far above SGD's; but exempt layers step with the rate as it is. Scales and
shifts of norms can bear that, biases of a model without norms cannot: give their group a rate of its
own, or take a rate that SGD could have and a larger coefficient (0.02 to 0.1).
"""

from typing import Any

import torch
from torch import Tensor

from allstep.optim.layerwise import Bundle, Group, LayerWise, Ratios, add_scaled, norms, sign, zeros


class LARS(LayerWise):
    """SGD whose rate is scaled layer by layer; see the module.

    lr: no one value is right, so there is no default; trust_coefficient: the fraction of its norm
    by which a layer's step moves it at lr=1; exempt: see `layerwise`.
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
        """What LARC makes of the ratios; not of the 1 that stands for none."""
        return ratios


def add_gradient(
    to: list[Tensor], bundle: Bundle, ratios: Ratios, group: Group, alpha: float
) -> None:
    """to += alpha * ratio * (gradient + decay * weight).

    The decay goes first: `to` may be the weights.
    """
    if group["weight_decay"] and not bundle.exempt:
        add_scaled(to, bundle.params, ratios, alpha * group["weight_decay"])
    add_scaled(to, bundle.grads, ratios, alpha * sign(group))
