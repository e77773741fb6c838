"""The score on a split, with each sample counted once.

It may import `train.task`, `train.input` and packages below them. Start reading at `evaluate`.
"""
