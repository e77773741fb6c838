"""The hosts of a run: their names, their addresses, and how a command is started on them.

Imports: `wire`, `machine` and below. Start with `parse`.
"""
