"""One update of a model: forward, backward, exchange, optimizer; and all that is decided once
before.

May import: `train.score` and below. Start with `step`.
"""
