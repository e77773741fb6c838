"""`allstep study data`: error by number of training samples, and how much more data a goal needs.

May import: the modules of `study`. Start with `learning_curve`, which needs no run.
"""
