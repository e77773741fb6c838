"""What `allstep data info|verify|index|show` report about a dataset.

May import: everything in `data`. Start with `info`.
"""
