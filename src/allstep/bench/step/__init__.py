"""`allstep bench step`: a training step next to plain PyTorch and DDP.

May import: everything below `bench`. Start with `measure`; `rank` runs in each worker.
"""
