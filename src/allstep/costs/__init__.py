"""What a collective costs: the formulas of the choice at run time and of the planner (D22).

`speed` has the three numbers that describe a link, `allreduce` a formula for each algorithm. Only
the standard library is needed, so that a table for thousands of workers does not wait for torch.
"""
