"""Samples in TFRecord files, read without TensorFlow.

May import: the other modules of `data.sources`. Start with `source`; `scan` finds the records,
`example` reads their protocol buffers.
"""
