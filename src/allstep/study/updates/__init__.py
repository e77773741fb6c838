"""`allstep study updates`: updates to a goal by batch, with the best of a few learning rates each.

May import: the modules of `study`. Start with `study`.
"""
