"""Packing a source into a few large shards: `pack` puts the parts together."""
