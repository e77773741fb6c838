"""The timeline: when each operation began and ended on each rank, as a trace for a browser.

May import: `comm.health`, `comm.join`. Start with `timeline`.
"""
