"""In which number format a model computes: autocast, loss scaling, casts.

May import: `train.config`. Start with `precision`.
"""
