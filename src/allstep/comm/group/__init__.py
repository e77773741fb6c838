"""The process group `allstep`, put together from shared memory and the network.

`init` joins the ranks, `build` makes a group of them, `process_group` is what torch sees.
May import: everything in `comm`. Start with `process_group`, then `plan`: which way a call takes.
"""
