"""`allstep bench sync`: push and pull of one key, next to MXNet, Gloo pairs and ZeroMQ.

May import: everything below `bench`. Start with `measure`; `store_rank` and `gloo_pairs` run in
workers of allstep's environment, `foreign_stores` in another one that has MXNet and pyzmq.
"""
