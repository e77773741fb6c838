"""What `allstep data info|verify|index|show` look at.

May import: everything in `data`. Start with `info`.
"""
