"""The loss around trained weights: random directions, and the line between two runs.

```
points        which weights to evaluate, by name; the grid of --points     (pure)
allowed       the estimated time and disk space, and the refusal            (pure)
point_file    each computed point, saved at once; an interrupted survey resumes from it
result        the files RUN/landscape/*.json                                (pure)
summary       the result as text                                            (pure)
directions    random directions with the norms of the model's filters       (torch)
weights       the weights of a point, set in place                          (torch)
survey        the points of one result, distributed over the workers        (torch)
run_surveys   what a worker does: load, estimate, evaluate, write           (torch)
```

A direction is drawn from (seed, number of the direction, tensor, filter), one worker sums the loss
of a whole point, and the result has no time and no number of workers. So any number of workers,
interrupted or not, writes the same file. The package itself imports no torch: `allstep.report`
reads and draws the results. Start with `points`, then `directions`.
"""
