"""The run folder: who may write into it, what is in it, and how it is read again.

May import: `train.config`. Start with `claim`.
"""
