"""The number format in which a model computes: autocast, loss scaling, casts.

It may import `train.config`. Start reading at `precision`.
"""
