"""What a run reports while it runs: to the terminal, to `run.jsonl`, to TensorBoard.

May import: `train.config`. Start with `events`.
"""
