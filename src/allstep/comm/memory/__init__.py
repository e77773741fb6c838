"""Tensors in memory that the ranks of a host share.

`segment` maps it, `arena` divides it, `flags` waits in it, `copy` and `reduce` work on it.
May import: `comm.op`, `comm.timeline`, `comm.health`, `comm.join`. Start with `segment`.
"""
