"""Collectives between hosts: Gloo, and our own algorithms on its point-to-point messages.

May import: `comm.op`, `comm.timeline`, `comm.health`, `comm.join`. Start with `algorithms`.
"""
