"""Random numbers that depend on seed, epoch and sample only: the same for any number of workers.

May import: nothing else in `data`. Start with `keys`.
"""
