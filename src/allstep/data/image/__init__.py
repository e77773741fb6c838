"""Decode stored images to pixels, and resize them."""
