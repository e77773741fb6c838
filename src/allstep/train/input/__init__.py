"""From a dataset to tensors: splits, classes, transforms, mean and std, loaders.

May import: `train.config`, `train.precision`. Start with `splits`.
"""
