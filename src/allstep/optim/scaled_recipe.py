"""From a recipe for one worker to the same recipe with a large batch, and a description of the
changes.

    scaled = scale(Recipe(lr=0.1, batch=128, num_samples=60_000, epochs=30), 4096)
    scaled.recipe         the large-batch recipe
    print(scaled)         batch 128 -> 4096 (x32): 14062 updates become 439
                          learning rate 0.1 -> 3.2 (linear rule: in proportion to the batch)
                          ...

It changes, in this order: the batch; the learning rate, by the rule of the optimizer
(`recipe.RULES`) or the requested rule; with `keep_updates` the epochs, so that the run has as many
updates as before (regime adaptation: Hoffer et al. 2017, https://arxiv.org/abs/1705.08741); the
warm-up: a gradual one from the old learning rate if there is none (Goyal et al. 2017: 5 epochs; in
a short run a sixth of it).

A recipe's own warm-up keeps its start if the learning rate rises; if it falls, the start falls in
proportion, or it might be above the learning rate. A requested warm-up (`warm_up_epochs`) starts at
the old learning rate if the learning rate rises, else at the recipe's own start.
"""

from dataclasses import dataclass, replace

from allstep.errors import ConfigError, did_you_mean
from allstep.optim.recipe import OWN_WARM_UP, RULES, Recipe
from allstep.optim.scaling_rules import SCALINGS

_RULE_TEXTS = {
    "linear": "in proportion to the batch",
    "square-root": "in proportion to the square root of the batch",
    "none": "whatever the batch",
}
_WARM_UP_EPOCHS = 5.0
_WARM_UP_SHARE = 1 / 6


@dataclass(frozen=True)
class Scaled:
    """A recipe, and the changes that led to it: one sentence per change."""

    recipe: Recipe
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.changes)


def scale(
    recipe: Recipe,
    batch: int,
    *,
    rule: str | None = None,
    warm_up_epochs: float | None = None,
    keep_updates: bool = False,
) -> Scaled:
    """Return the recipe for updates of `batch` samples over all workers.

    `rule`: linear, square-root or none; None (default) is the optimizer's usual one.
    `warm_up_epochs`: epochs of a gradual warm-up; None (default) chooses them, 0 keeps the
    recipe's. `keep_updates`: train for more epochs, so that the number of updates is kept (default:
    False).
    """
    base = recipe.known_batch
    rule = RULES[recipe.optimizer] if rule is None else rule
    if rule not in SCALINGS:
        raise ConfigError(f"scaling rule {rule!r} is unknown; {did_you_mean(rule, SCALINGS)}")
    if not 1 <= batch <= recipe.num_samples:
        raise ConfigError(
            f"batch {batch}: from 1 to the {recipe.num_samples} samples that there are"
        )
    lr = SCALINGS[rule](recipe.lr, batch, base)
    # The last one, since products are rounded.
    start = min(recipe.warm_up_from, recipe.warm_up_from * lr / recipe.lr, lr)
    large = replace(recipe, batch=batch, lr=lr, warm_up_from=start)
    if keep_updates:
        large = _stretched(large, batch / base)
    large = _warmed_up(large, recipe, warm_up_epochs)
    if batch == base:
        return Scaled(large, tuple(_describe_same_batch(recipe, large, keep_updates)))
    return Scaled(large, tuple(_describe(recipe, large, rule)))


def _stretched(recipe: Recipe, factor: float) -> Recipe:
    """Return the recipe with more epochs, and its schedule with them."""
    return replace(
        recipe,
        epochs=recipe.epochs * factor,
        milestones=tuple(each * factor for each in recipe.milestones),
        warm_up_epochs=recipe.warm_up_epochs * factor,
    )


def _warmed_up(large: Recipe, small: Recipe, epochs: float | None) -> Recipe:
    """Return the recipe with a warm-up, if one is requested or the learning rate rose without."""
    if epochs is None:
        wanted = (
            large.lr > small.lr and small.warm_up == "none" and small.schedule not in OWN_WARM_UP
        )
        epochs = (
            min(_WARM_UP_EPOCHS, _WARM_UP_SHARE * large.epochs, *large.milestones)
            if wanted
            else 0.0
        )
        if epochs and epochs in large.milestones:
            # The learning rate should stay at its peak for a while.
            epochs /= 2
    if not epochs:
        return large
    start = small.lr if large.lr > small.lr else large.warm_up_from
    return replace(large, warm_up="gradual", warm_up_epochs=epochs, warm_up_from=start)


def _describe_same_batch(small: Recipe, large: Recipe, keep_updates: bool) -> list[str]:
    kept = f", and its {small.num_updates} updates are kept as they are" * keep_updates
    if large == small:
        return [f"nothing: {small.batch} is the batch that the recipe was written for{kept}"]
    return [
        (
            f"batch {small.batch} and learning rate {small.lr:g} stay: the recipe was written for"
            f" them{kept}"
        ),
        *_warm_up(small, large),
    ]


def _describe(small: Recipe, large: Recipe, rule: str) -> list[str]:
    factor = large.known_batch / small.known_batch
    changes = [
        (
            f"batch {small.batch} -> {large.batch} (x{factor:g}): {small.num_updates} updates"
            f" become {large.num_updates}"
        ),
        f"learning rate {small.lr:g} -> {large.lr:g} ({rule} rule: {_RULE_TEXTS[rule]})",
    ]
    if large.epochs != small.epochs:
        changes.append(
            f"epochs {small.epochs:g} -> {large.epochs:g}, and the schedule with them, to keep the"
            " updates"
        )
    changes += _warm_up(small, large)
    if large.momentum:
        changes.append(
            f"momentum {large.momentum:g} stays, without correction: torch has the learning rate"
            " outside of the momentum"
        )
    return changes


def _warm_up(small: Recipe, large: Recipe) -> list[str]:
    """Describe the new warm-up, if it changed."""
    parts = [(each.warm_up, each.warm_up_epochs, each.warm_up_from) for each in (small, large)]
    if large.warm_up == "none" or parts[0] == parts[1]:
        return []
    updates = large.warm_up_epochs * large.num_samples / large.known_batch
    return [
        f"warm-up from {large.warm_up_from:g} to {large.lr:g} over {large.warm_up_epochs:g} epochs"
        f" ({updates:.0f} updates)"
    ]
