"""One update of a model: forward, backward, gradient exchange, optimizer.

The package also has the decisions that a run makes once, before its first step: precision,
execution, learning rate, micro-batch size. It may import `train.score` and packages below it. Start
reading at `step`.
"""
