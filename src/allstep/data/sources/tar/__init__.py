"""Samples in tar files (WebDataset): members with the same key form one sample.

May import: the other modules of `data.sources`. Start with `source`; `scan` reads the headers.
"""
