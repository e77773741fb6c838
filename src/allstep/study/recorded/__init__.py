"""What the record of a run shows about its workers: series of values, worlds, the split of time.

`study.scale` and `report` read runs with the same functions and the same limits (`split`).
"""
