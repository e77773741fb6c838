"""`allstep bench step --framework`: a step of Keras, TensorFlow or MXNet next to plain copies.

May import: everything below `bench`. Start with `measure`; `rank` runs in each of our workers,
`peer_rank` in each worker of another library.
"""
