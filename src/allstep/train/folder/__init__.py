"""The run folder: which process may write to it, what it contains, and how it is read again.

May import: `train.config`. Start with `claim`.
"""
