"""Answers for a user's question about a recipe: tables, what-ifs, goodput.

```
question_text          lists of workers, speeds, changes as text
alone                  a calibration for hardware that is not present
what_ifs               what one change would save; what limits the speed
goodput                best batch and time to a goal, by number of workers
plan_table, goodput_table      both as text and as JSON
```
"""
