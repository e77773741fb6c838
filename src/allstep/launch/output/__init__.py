"""The output of all workers as one stream of lines, and as log files.

Imports: `console`, `files` and below. Start with `writer`.
"""
