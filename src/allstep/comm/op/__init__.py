"""Collective operations independent of their transport: arguments, arithmetic and work objects.

May import: `comm.health`, `comm.join`. Start with `transport`, the interface of everything that
moves tensors between ranks.
"""
