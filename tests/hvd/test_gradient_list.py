"""The list of gradients that front-ends pass in one call, from init() to shutdown()."""

import pytest
import torch

from support.ranks import Ranks

LIKE = [("a", torch.zeros(4)), ("b", torch.zeros(2, 3))]


def test_average_sum_and_other_reductions(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd
        from allstep.hvd.gradient_list import GradientList

        hvd.init()
        first, second = (torch.tensor([1.0, -2.0, 3.0, 4.0]) * (r + 1) for r in range(2))
        expected = {
            hvd.Average: (first + second) / 2,
            hvd.Sum: first + second,
            hvd.Min: torch.minimum(first, second),
            hvd.Max: torch.maximum(first, second),
            hvd.Product: first * second,
        }
        for op, value in expected.items():
            made = GradientList(LIKE, op=op)
            mine = first if hvd.rank() == 0 else second
            found, none = made.reduce([mine, None])
            assert none is None and found is not None
            torch.testing.assert_close(found, value)
            assert found.data_ptr() != mine.data_ptr()
        large = torch.arange(40000.0).view(2, -1)
        for dtype in (torch.float32, torch.float16, torch.int32):
            given = (large % 8).to(dtype)
            like = torch.zeros((), dtype=dtype)
            made = GradientList([("l", like.expand(given.shape)), ("s", like.expand(4))])
            # A large array that only one rank has, next to a small one.
            arrays = [given if hvd.rank() == 1 else None, given[0, :4] * (hvd.rank() + 1)]
            both, small = made.reduce(arrays)
            assert both is not None and torch.equal(both, (given.double() / 2).to(dtype))
            assert small is not None
            assert torch.equal(small, (given[0, :4].double() * 1.5).to(dtype))
            assert torch.equal(given, (large % 8).to(dtype))
        hvd.shutdown()

    ranks(2, work)


def test_one_rank_gets_its_own_arrays_back(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd
        from allstep.hvd.gradient_list import GradientList

        hvd.init()
        mine = torch.ones(4)
        assert GradientList(LIKE).reduce([mine, None])[0] is mine

    ranks(1, work)


def test_a_list_outlives_an_engine(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd
        from allstep.hvd.gradient_list import GradientList

        hvd.init()
        made = GradientList(LIKE)
        for _ in range(3):
            for _ in range(2):
                result = made.reduce([torch.full((4,), float(hvd.rank())), None])[0]
                assert result is not None and result.tolist() == [0.5] * 4
            hvd.shutdown()
            hvd.init()

    ranks(2, work)


def test_a_rank_that_has_joined_counts_as_zero(ranks: Ranks) -> None:
    def work() -> list[float]:
        import allstep.torch as hvd
        from allstep.hvd.gradient_list import GradientList

        hvd.init()
        made = GradientList(LIKE, op=hvd.Sum)
        results = []
        for _ in range(2 + hvd.rank()):
            result = made.reduce([torch.ones(4), None])[0]
            assert result is not None
            results.append(float(result[0]))
        hvd.join()
        return results

    assert ranks(2, work) == [[2.0, 2.0], [2.0, 2.0, 1.0]]


def test_a_lost_rank_is_horovods_error_with_the_cause(ranks: Ranks) -> None:
    def work() -> None:
        import os

        import allstep.torch as hvd
        from allstep.errors import PeerLost
        from allstep.hvd.exceptions import HorovodInternalError
        from allstep.hvd.gradient_list import GradientList

        hvd.init()
        made = GradientList(LIKE)
        made.reduce([torch.ones(4), None])
        if hvd.rank() == 1:
            os.kill(os.getpid(), 9)
        with pytest.raises(HorovodInternalError) as caught:
            made.reduce([torch.ones(4), None])
        assert isinstance(caught.value.__cause__, PeerLost)

    outcomes = ranks.outcomes(2, work)
    assert [outcome.exit_code for outcome in outcomes] == [0, -9]


@pytest.mark.parametrize("dies_in", ["engine", "agreement", "memory"])
def test_a_rank_lost_before_the_first_step_is_noticed_at_once(ranks: Ranks, dies_in: str) -> None:
    """A rank that waits for another one in the store must not wait for the start timeout."""

    def work() -> float:
        import os
        import time

        import allstep.torch as hvd
        from allstep.errors import PeerLost
        from allstep.hvd.exceptions import HorovodInternalError
        from allstep.hvd.gradient_list import GradientList
        from allstep.parallel.exchange import array_list

        hvd.init()
        if dies_in != "engine":
            GradientList(LIKE).reduce([torch.ones(4), None])
        made = GradientList(LIKE)
        if hvd.rank() == 1:
            time.sleep(1)
            if dies_in != "memory":
                os._exit(9)
            array_list.make_pack = lambda *_: os._exit(9)
        began = time.monotonic()
        with pytest.raises(HorovodInternalError) as caught:
            made.reduce([torch.ones(4), None])
        if dies_in != "engine":
            assert isinstance(caught.value.__cause__, PeerLost), caught.value.__cause__
        assert "lost rank 1 (process exited)" in str(caught.value)
        return time.monotonic() - began

    first, second = ranks.outcomes(2, work)
    assert (first.exit_code, second.exit_code) == (0, 9), first.output
    assert first.result < 5


def test_equal_names_are_different_arrays_and_results_are_aligned(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd
        from allstep.hvd.gradient_list import GradientList

        hvd.init()
        sizes = (3, 5, 1)
        made = GradientList([("same", torch.zeros(size)) for size in sizes], op=hvd.Sum)
        for _ in range(3):
            found = made.reduce([torch.full((size,), float(size)) for size in sizes])
            for each, size in zip(found, sizes, strict=True):
                assert each is not None and each.tolist() == [2.0 * size] * size
                assert each.data_ptr() % 64 == 0
        hvd.shutdown()

    ranks(2, work)


def test_lists_of_a_subset_do_not_shift_the_lists_of_all(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd
        from allstep.hvd.gradient_list import GradientList

        only = hvd.ProcessSet([0, 1])
        hvd.init(process_sets=[only])
        if hvd.rank() < 2:
            found = GradientList(LIKE, process_set=only).reduce([torch.ones(4), None])[0]
            assert found is not None and found.tolist() == [1.0] * 4
        found = GradientList(LIKE, op=hvd.Sum).reduce([torch.ones(4), None])[0]
        assert found is not None and found.tolist() == [3.0] * 4

    ranks(3, work)


def test_sparse_gradients_match_if_one_rank_has_an_optimizer_more(ranks: Ranks) -> None:
    """Rank 0 alone compiles a second model, such as one that it loads; then all ranks train."""

    def work() -> tuple[list, list]:
        import allstep.torch as hvd
        from allstep.keras_shared.gradient_reduction import Reduction, Settings, Sparse, Spec

        hvd.init()
        settings = Settings(hvd.Sum, None, None, hvd.global_process_set, False, 1, False, True)
        made = [Reduction(settings, in_place=False) for _ in range(2 - hvd.rank())]
        made[-1].prepare((Spec("table", (4, 1), torch.float32, False),))
        rows = Sparse(torch.full((1, 1), hvd.rank() + 1.0), torch.tensor([hvd.rank()]))
        updates, (found,) = made[-1].step([rows])
        assert updates and isinstance(found, Sparse)
        return found.values.flatten().tolist(), found.indices.tolist()

    assert ranks(2, work, env={"ALLSTEP_TIMEOUT": "10"}) == [([1.0, 2.0], [0, 1])] * 2
