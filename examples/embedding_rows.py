"""An embedding with a million rows: each step pulls and pushes only the rows of its batch.

allstep run -np 2 examples/embedding_rows.py [--rows 1000000] [--steps 200]
allstep run -np 2 --servers 2 examples/embedding_rows.py    # the table on servers

Synthetic clicks: each user and each item has a hidden group, and a user clicks on items of the own
group. The model learns a vector for each of them, all in one table; few rows are popular, as in
real data. A worker keeps a copy of the table, in which only the rows of its batch are current.
"""

import argparse
import time

import torch
from allstep import kvstore
from torch import nn

WIDTH, BATCH, GROUPS = 16, 512, 8


def batch_of(draws, num_rows):
    """Pairs of user and item, each a row of the table, and whether the user clicked."""
    popular = torch.rand(BATCH, 2, generator=draws) ** 12  # many requests for few rows
    pairs = (popular * (num_rows // 2)).long()
    clicks = (pairs[:, 0] % GROUPS == pairs[:, 1] % GROUPS).float()
    pairs[:, 1] += num_rows // 2  # users first, then items
    return pairs, clicks


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    table = nn.Embedding(options.rows, WIDTH, sparse=True)
    nn.init.normal_(table.weight, std=0.3)
    with kvstore.create("dist_async") as kv:
        kv.init("table", table.weight)
        # Lazy Adam: the means of a row change in the steps that have a gradient for it.
        kv.set_optimizer(torch.optim.Adam, lr=0.1 / kv.num_workers)
        draws = torch.Generator().manual_seed(kv.rank)
        rows = torch.sparse_coo_tensor(size=table.weight.shape, check_invariants=False)
        losses, start = [], time.monotonic()
        for _ in range(options.steps):
            pairs, clicks = batch_of(draws, options.rows)
            kv.row_sparse_pull("table", out=rows, row_ids=pairs)
            with torch.no_grad():
                table.weight.index_copy_(0, rows.indices()[0], rows.values())
            user, item = table(pairs).unbind(1)
            score = (user * item).sum(1)
            loss = nn.functional.binary_cross_entropy_with_logits(score, clicks)
            table.weight.grad = None
            loss.backward()
            kv.push("table", table.weight.grad)
            losses.append(loss.item())
        seconds = time.monotonic() - start
        kv.barrier()
        first, last = (sum(part) / len(part) for part in (losses[:20], losses[-20:]))
        if kv.rank == 0:
            print(
                f"{options.rows} rows, {kv.num_workers} workers: loss {first:.3f} -> {last:.3f},"
                f" {1000 * seconds / options.steps:.1f} ms a step"
            )


if __name__ == "__main__":
    main()
