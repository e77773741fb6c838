"""Which hosts a run uses, at which addresses, and how a command is started there.

May import: `wire`, `machine` and below. Start with `parse`.
"""
