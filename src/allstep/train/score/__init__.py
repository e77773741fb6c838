"""Loss and accuracy on a split, each sample counted once, and which samples are wrong.

May import: `train.input` and below. Start with `evaluate`.
"""
