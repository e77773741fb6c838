"""What a run is: its keys, where their values come from, and whether they fit together.

May import: nothing else in `train`. Start with `run_config`, then `read`.
"""
