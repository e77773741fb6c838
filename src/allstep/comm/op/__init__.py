"""What a collective operation is, whatever carries it: its arguments, its arithmetic, its handle.

May import: `comm.health`, `comm.join`. Start with `transport`, the protocol of all that carry
tensors.
"""
