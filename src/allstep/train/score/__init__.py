"""Loss and accuracy on a split, with each sample counted once, and the wrong predictions.

It may import `train.task`, `train.input` and packages below them. Start reading at `evaluate`.
"""
