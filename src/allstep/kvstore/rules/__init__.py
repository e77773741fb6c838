"""The store's rules as pure functions: no process, no clock, no shared memory.

```
store_kinds    names of stores -> what the store does
key_lists      arguments of a call -> values by key
slices         a value -> ranges of 1 MB
placement      keys -> servers, by bytes (for stores between hosts)
successors     lost servers -> where their parts go
offers         copies of a part -> the freshest one
gradient_age   versions read -> whether an update may be applied (D17)
```
"""
