"""Adasum, which averages parallel gradients and adds orthogonal gradients.

For two vectors    A(a, b) = (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

For 2^k ranks it is the balanced tree A(A(g0, g1), A(g2, g3)). At level l every rank exchanges its
vector with the rank whose number differs in bit l. Both compute the same sum with the lower rank's
vector first, so that they get the same bits. Dot products are float64.

S. Maleki et al., Scaling distributed training with adaptive summation, MLSys 2021.
"""

import torch
from torch import Tensor

from allstep.comm.group.process_group import AllstepGroup

# About the square root of the smallest double: a squared norm below it counts as zero.
_TINY = 1.5e-154


def combine(group: AllstepGroup, vector: Tensor) -> Tensor:
    """Return the Adasum of the ranks' vectors. The number of ranks must be a power of two."""
    size, rank = group._size, group._rank
    distance = 1
    while distance < size:
        partner = rank ^ distance
        other = torch.empty_like(vector)
        sending = group.send([vector], partner)
        group.recv([other], partner).wait()
        sending.wait()
        vector = pair(vector, other) if rank < partner else pair(other, vector)
        distance *= 2
    return vector


def pair(first: Tensor, second: Tensor) -> Tensor:
    """Return A(first, second), rounded once to their dtype."""
    a, b = first.double().view(-1), second.double().view(-1)
    dot, norm_a, norm_b = (float(torch.dot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    of_a = 1.0 - dot / (2.0 * norm_a) if norm_a >= _TINY else 1.0
    of_b = 1.0 - dot / (2.0 * norm_b) if norm_b >= _TINY else 1.0
    exact = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
    return (first.to(exact) * of_a + second.to(exact) * of_b).to(first.dtype)
