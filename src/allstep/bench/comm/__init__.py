"""`allstep bench comm`: collectives next to Gloo's and mpi4py's, in the same run.

May import: everything below `bench`. Start with `measure`; `rank` runs in each worker.
"""
