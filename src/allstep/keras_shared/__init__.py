"""What the front-ends for Keras 3 (`allstep.keras`) and Keras 2 (`allstep.keras2`) share.

Nothing here imports a Keras: a worker loads only the one that its script uses. Classes without a
base of Keras are mixins; each front-end combines them with the callbacks of its Keras.
"""
