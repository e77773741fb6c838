"""The config of a run: its keys, the origin of their values, and checks that they fit together.

It may import nothing else in `train`. Start reading at `run_config`, then `read_config`.
"""
