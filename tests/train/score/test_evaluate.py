"""Evaluation compared with slow numpy, on one rank and on several; wrong labels end all ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import allstep
from allstep.data import Loader
from allstep.train.score.evaluate import evaluate, outputs
from allstep.train.task.classification import Classification, hits
from allstep.train.task.tally import Tally
from allstep.train.watch.events import Score
from support.array_sources import Arrays
from support.scores import classified


def slow_score(logits: Any, labels: Any) -> Score:
    """Return the score, computed sample by sample in float64."""
    loss, correct, top5 = 0.0, 0, 0
    for row, label in zip(logits.astype(np.float64), labels, strict=True):
        loss += np.log(np.exp(row - row.max()).sum()) + row.max() - row[label]
        order = np.argsort(-row).tolist()
        correct += order[0] == label
        top5 += label in order[:5]
    count = len(labels)
    return classified(loss / count, correct / count, count, top5 / count)


def samples(n: int, classes: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(n * 1000 + classes)
    return rng.standard_normal((n, 1, 4, 6), np.float32), rng.integers(0, classes, n)


def made_model(classes: int) -> nn.Module:
    torch.manual_seed(classes)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(24, classes))


def score_of(n: int, classes: int, mirror: bool) -> tuple[Score, bool]:
    world = allstep.init()
    images, labels = samples(n, classes)
    model = made_model(classes)
    model[1].eval()  # type: ignore[index]  # a frozen part
    loader = Loader(Arrays(images, labels), batch=4, world=world, seed=None)
    score = evaluate(model, loader, lambda data: data, Classification(classes), flip=mirror)
    return score, (model.training, model[1].training, model[2].training) == (True, False, True)  # type: ignore[index]


@pytest.mark.parametrize(
    ("num_ranks", "n", "classes", "mirror"),
    [(1, 13, 10, False), (3, 13, 10, True), (3, 2, 3, False)],
)
def test_every_sample_counts_once(
    ranks: Any, num_ranks: int, n: int, classes: int, mirror: bool
) -> None:
    images, labels = samples(n, classes)
    weight, bias = (p.detach().numpy() for p in made_model(classes).parameters())
    logits = images.reshape(n, -1) @ weight.T + bias
    if mirror:
        logits = (logits + images[..., ::-1].reshape(n, -1) @ weight.T + bias) / 2
    expected = slow_score(logits, labels)
    for score, modes_are_back in ranks(num_ranks, score_of, n, classes, mirror):
        assert (score.loss, score.accuracy, score.top5) == pytest.approx(
            (expected.loss, expected.accuracy, expected.top5)
        )
        assert score.count == n
        assert modes_are_back


def meet_a_wrong_label(label: int) -> None:
    world = allstep.init()
    images, labels = samples(12, 3)
    labels[7] = label
    loader = Loader(Arrays(images, labels), batch=4, world=world, seed=None)
    try:
        evaluate(made_model(3), loader, lambda data: data, Classification(3))
    except allstep.UserError as error:
        print(error)
        raise SystemExit(error.exit_code) from None


def test_a_label_that_is_no_class_ends_all_ranks(ranks: Any) -> None:
    outcomes = ranks.outcomes(3, meet_a_wrong_label, 3)
    assert [outcome.exit_code for outcome in outcomes] == [2, 2, 2]
    assert (
        "sample 7 (memory at byte 7): its label is 3, the model's classes are 0 to 2"
        in outcomes[0].output
    )


@pytest.mark.parametrize(
    ("target", "what"),
    [([0, -1, 2], "its label is -1"), ([[0.5, 0.5]] * 3, "its target has 2 classes")],
)
def test_wrong_targets_have_a_name(target: Any, what: str) -> None:
    images, _ = samples(3, 3)
    loader = Loader(Arrays(images, np.array(target)), batch=3, seed=None)
    with pytest.raises(allstep.UserError, match=what):
        Classification(3).check_targets(next(iter(loader.batches())), loader)


def test_a_tally_adds_and_travels() -> None:
    logits, labels = (
        torch.randn(20, 7, generator=torch.Generator().manual_seed(1)),
        torch.arange(20) % 7,
    )
    loss = nn.functional.cross_entropy(logits, labels, reduction="none")
    whole, first, second = (Tally.of_training(Classification(7)) for _ in range(3))
    whole.add(loss.sum(), hits(logits, labels), 20)
    first.add(loss[:6].sum(), hits(logits[:6], labels[:6]), 6)
    soft = nn.functional.one_hot(labels[6:], 7) * 0.8 + 0.1
    second.add(loss[6:].sum(), hits(logits[6:], soft), 14)
    both = first + first.with_sums(second.sums())
    assert both.sums() == pytest.approx(whole.sums())
    expected = slow_score(logits.numpy(), labels.numpy())
    assert (both.score().accuracy, both.score().top5) == (expected.accuracy, expected.top5)
    assert Tally.of_training(Classification(7)).score() == Score(0.0, 0)


def test_logits_have_at_least_32_bits() -> None:
    model = nn.Linear(4, 2)
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        assert outputs(model.to(dtype), torch.zeros(1, 4, dtype=dtype)).dtype == expected
