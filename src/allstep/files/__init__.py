"""Files that others may have written or may read: bounded reading, whole writing, locks.

Standard library only. Imports only `errors`. Start with `bounded` and `replace`.
"""
