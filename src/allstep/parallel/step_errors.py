"""Messages for calls of a replicated optimizer in the wrong order."""

REDUCED = (
    "optimizer.{}() after optimizer.reduce_gradients(): the gradients are those of all ranks"
    " already. Call optimizer.apply() to use them, or optimizer.discard() to drop them"
)
SYNCHRONIZED = (
    "optimizer.reduce_gradients() after optimizer.synchronize(), which has reduced them. Use one of"
    " the two: a step is `reduce_gradients(); apply()`, or `synchronize()` and `with"
    " optimizer.skip_synchronize(): step()`"
)
NOT_REDUCED = (
    "optimizer.apply(): there are no reduced gradients. Call optimizer.reduce_gradients() after"
    " backward(), before each apply()"
)
UNUSED = (
    "none of this optimizer's {} parameters has a gradient, on any rank: step() changes nothing."
    " If the model got other parameters after the optimizer was made"
    " (load_state_dict(assign=True)), make a new optimizer"
)
