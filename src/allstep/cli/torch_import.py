"""The import of torch by a command that computes in its own process.

It comes after the checks of input and before modules that need torch; see
`process.large_imports`.
"""

import sys

from allstep.process.large_imports import uncollected


def import_torch(*, optimizers: bool) -> None:
    """Import torch; with `optimizers`, also what the first one of a process imports: as much again.

    For a command that trains. A process that has torch called the command as a function: it stays
    as it is.
    """
    if "torch" in sys.modules:
        return
    with uncollected():
        import torch

        if optimizers:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
