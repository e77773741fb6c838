"""Files that other programs write or read: bounded reading, atomic writing, locks.

```
bounded   reads untrusted files: regular ones only, at most so many bytes, JSON of bounded depth
yaml      the same for YAML
atomic    writes files that appear complete or not at all
lock      locks between processes
home      `~` in a path, the folders for caches and settings
```

Uses the standard library and PyYAML; imports only `errors`. Start with `atomic`.
"""
