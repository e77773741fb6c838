"""The measured scaling of a recipe: speed by number of workers, and where it is lost.

May import: the modules of `study` above the empty line, `recorded`, `plan` and `train`.
"""
