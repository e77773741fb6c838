"""From stored bytes to pixels, the random numbers of a picture, and what is done to whole batches."""
