"""From stored bytes to pixels, the random numbers of an image, and what is done to whole batches."""
