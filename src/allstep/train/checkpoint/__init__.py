"""Checkpoints: whole or absent, tensors as safetensors, numbers as JSON, checksums last.

May import: `train.step` and below. Start with `write_and_read`.
"""
