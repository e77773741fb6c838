"""Replay: the weights of a run again, in one process, from its order log (D19).

Every push is computed as in the run: its gradient from the weights of the version that its party
read, then the update of the newest weights, unit by unit with the same code. So the bits are the
same, if `gradients` computes the same gradient on the same samples.

Weights of earlier versions are kept as long as a later push reads them: with N parties about N
copies. A push that was torn by a kill cannot be reproduced, since nothing records which elements it
had changed; replay stops there and returns it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from allstep.kvstore.training.layout import Layout
from allstep.kvstore.training.model_copy import ModelCopy
from allstep.kvstore.training.options import Options
from allstep.kvstore.training.push import Claim, Push
from allstep.kvstore.training.unit_updates import StatePlan, private_memory
from allstep.kvstore.training.whole_state import put_state, whole_state
from allstep.parallel.exchange import Named
from allstep.parallel.updates.by_owners import needs_whole_parameters

Gradients = Callable[[Claim], bool | None]
"""Computes the gradients of a step from the parameters as they are; False: the step was skipped."""


def replay(
    optimizer: Any,
    wrapped: type,
    named: Sequence[Named],
    pushes: Sequence[Push],
    gradients: Gradients,
    options: Options,
) -> Push | None:
    """Repeat pushes on an optimizer's parameters and state; return one that cannot be repeated.

    optimizer: of the class `wrapped`, with weights and state of the synchronization point before
    `pushes`; afterwards with those of the point after them. named: its parameters, as in the run.
    gradients: called for each step of a push. options: those of the run.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    layout = Layout(groups, named, needs_whole_parameters(wrapped))
    plan = StatePlan(optimizer, wrapped, layout)
    weights, state = private_memory(layout.nbytes), private_memory(plan.nbytes)
    copy = ModelCopy(optimizer, wrapped, plan, weights, state)
    put_state(layout, copy.updates.has_state, copy.updates.states, optimizer.state)
    copy.put()
    torn = _repeat(optimizer, copy, pushes, gradients, options)
    _set_own(copy, copy.present)
    optimizer.state.clear()
    for number, values in whole_state(layout, copy.updates.has_state, copy.updates.states).items():
        optimizer.state[layout.named[number].parameter] = values
    return torn


def _repeat(
    optimizer: Any,
    copy: ModelCopy,
    pushes: Sequence[Push],
    gradients: Gradients,
    options: Options,
) -> Push | None:
    last_use = {push.read: place for place, push in enumerate(pushes)}
    versions: dict[int, list[Tensor]] = {}
    for place, push in enumerate(pushes):
        if push.is_torn:
            return push
        # The version before this push.
        if push.made - 1 in last_use:
            versions[push.made - 1] = [flat.clone() for flat in copy.present]
        _set_own(copy, versions[push.read])
        _add_up(copy, push, gradients, options)
        copy.use_groups(optimizer.param_groups, push.lrs)
        for index in range(len(copy.layout.units)):
            copy.apply(index, options.strength if push.age else 0.0)
        for version in [each for each in versions if last_use[each] <= place]:
            del versions[version]
    return None


def _set_own(copy: ModelCopy, flats: Sequence[Tensor]) -> None:
    for own, flat in zip(copy.own, flats, strict=True):
        own.copy_(flat)
    copy.bump_versions()


def _add_up(copy: ModelCopy, push: Push, gradients: Gradients, options: Options) -> None:
    """Compute the gradient of a push, as `SharedModel.step` does."""
    added = 0
    for claim in push.claims:
        if gradients(claim) is False:
            continue
        if options.steps == 1:
            copy.take_gradients()
        else:
            copy.take_gradients(claim.count, is_first=not added)
        added += claim.count
    if options.steps > 1:
        copy.divide_gradients(added)
