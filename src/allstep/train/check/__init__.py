"""Does it work at all: a dry run, a few samples learned by heart, N workers against one.

May import: everything in `train`. Start with `verify`.
"""
