"""Health of a run: divergence, unequal replicas, stop requests, and a valid state in checkpoints.

May import: `train.checkpoint` and below. Start with `divergence`.
"""
