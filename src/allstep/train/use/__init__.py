"""What a finished run is good for: predict images, evaluate again.

May import: everything in `train` but `check`. Start with `load`.
"""
