"""`allstep study batch`: accuracy by batch and remedy, after the same number of epochs.

May import: the modules of `study`. Start with `study`.
"""
