"""Samples in tar files (WebDataset): members with one key are one sample.

May import: the other modules of `data.sources`. Start with `source`; `scan` walks through the
headers.
"""
