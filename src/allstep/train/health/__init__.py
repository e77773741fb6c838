"""Is the run still sound: divergence, replicas that differ, a request to stop, a state that fits.

May import: `train.checkpoint` and below. Start with `divergence`.
"""
