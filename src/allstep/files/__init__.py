"""Files that others may have written or may read: bounded reading, whole writing, locks.

```
bounded   files of other people: regular ones only, so many bytes, JSON of a bounded depth
yaml      the same for YAML
whole     files that are there whole or not at all
lock      one process at a time
home      `~` in a path, the folders for caches and settings
```

Standard library only (and PyYAML). Imports only `errors`. Start with `whole`.
"""
