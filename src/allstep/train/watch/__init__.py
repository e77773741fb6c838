"""What a run tells others while it runs: the terminal, `run.jsonl`, TensorBoard.

May import: `train.config`. Start with `events`.
"""
