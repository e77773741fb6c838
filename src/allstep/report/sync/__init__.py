"""Asynchronous runs in the report: figures of their parties, and what another mode would gain.

May import: the modules of `report` that read a record.
"""
