"""Packing of a source into a few large shards; the entry point is `pack.pack`."""
