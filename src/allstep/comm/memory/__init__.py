"""Collectives in memory that the ranks of a host share.

`segment` maps the memory, `arena` divides it, `flags` waits in it, `copy` and `reduce` are the
collectives. May import: `comm.op`, `comm.timeline`, `comm.health`, `comm.join`. Start with
`segment`.
"""
