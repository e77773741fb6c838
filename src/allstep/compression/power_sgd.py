"""`powersgd:r`: the tensor as a matrix of rank r (Vogels et al., arXiv 1905.13727).

    M, n x m, nearly square, filled up with zeros        sent: P, n x r, and Q, m x r
    P = orthogonalized(M (M^T (M Q0)));  Q = M^T P       decoded: P Q^T

A step of the power iteration brings P near the r largest singular vectors. The start Q0 is random,
and the same at every call. (The paper starts from the last Q instead, which keeps state and saves
one multiplication.) The whole tensor is one block. It needs error feedback.
"""

import math

import torch
from torch import Tensor


class PowerSGD:
    """Sends two thin matrices whose product is near the tensor's matrix."""

    block: int | None = None

    def __init__(self, text: str, rank: int) -> None:
        self.text, self.rank = text, rank

    def nbytes(self, numel: int) -> int:
        rows, columns = _shape(numel)
        return 4 * (rows + columns) * self._rank_of(numel)

    def encode_block(self, values: Tensor, out: Tensor) -> None:
        rows, columns = _shape(values.numel())
        matrix = torch.zeros(rows, columns)
        matrix.view(-1)[: values.numel()].copy_(values)
        left, right = self._factors(out, values.numel())
        start = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
        found = matrix @ (matrix.t() @ (matrix @ start))
        # Scaled first: products of three small gradients are near the smallest float.
        left.copy_(torch.linalg.qr(found / found.abs().amax().clamp_min(1e-38)).Q)
        torch.matmul(matrix.t(), left, out=right)

    def decode_block(self, encoded: Tensor, out: Tensor) -> None:
        left, right = self._factors(encoded, out.numel())
        out.copy_((left @ right.t()).view(-1)[: out.numel()])

    def _factors(self, encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        rank, (rows, columns) = self._rank_of(numel), _shape(numel)
        left, right = torch.split(encoded.view(torch.float32), [rows * rank, columns * rank])
        return left.view(rows, rank), right.view(columns, rank)

    def _rank_of(self, numel: int) -> int:
        return min(self.rank, *_shape(numel))


def _shape(numel: int) -> tuple[int, int]:
    """Return the shape of a nearly square matrix with room for `numel` elements."""
    rows = max(1, math.isqrt(numel))
    return rows, -(-numel // rows)
