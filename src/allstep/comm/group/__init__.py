"""The process group `allstep`, built from shared memory and the network.

`init` joins the ranks, `build` creates a group of them, `process_group` is the class that torch
calls. May import: everything in `comm`. Start with `process_group`, then `plan`: how a call is run.
"""
