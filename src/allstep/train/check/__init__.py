"""Checks before a long run: a dry run, memorizing a few samples, N workers against one.

May import: everything in `train`. Start with `verify`.
"""
