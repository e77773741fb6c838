"""Horovod's API for Keras: `import allstep.keras as hvd`.

It works with Keras 3 on TensorFlow, torch and JAX.
"""
