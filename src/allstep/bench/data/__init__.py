"""`allstep bench data`: the loader next to other loaders, and next to the same work without one.

May import: everything below `bench`. Start with `measure`; `peers` holds the other loaders,
`ceiling` what the workers could deliver.
"""
