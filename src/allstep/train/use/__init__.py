"""Uses of a trained model: predict images, evaluate again.

May import: everything in `train` but `check`. Start with `load`.
"""
