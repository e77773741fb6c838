"""The study of `sync` modes: accuracy, throughput and time to a goal, with and without faults.

May import: the modules of `study` above the empty line, and `train`.
"""
