"""Placement by bytes: every byte once, servers filled evenly; and slices of 1 MB."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from allstep.kvstore.rules.placement import MIN_PART, Part, Placement, imbalance, place
from allstep.kvstore.rules.slices import SLICE_BYTES, cut

SIZES = st.lists(st.integers(0, 3_000) | st.integers(0, 40_000_000), min_size=1, max_size=60)


def parts_by_key(servers: list[list[Part]]) -> dict[object, list[tuple[int, int]]]:
    found = defaultdict(list)
    for part in (part for parts in servers for part in parts):
        found[part.key].append((part.start, part.end))
    return {key: sorted(ranges) for key, ranges in found.items()}


@given(SIZES, st.integers(1, 12))
def test_every_byte_has_one_server(sizes: list[int], num_servers: int) -> None:
    servers = place(dict(enumerate(sizes)), num_servers)
    assert len(servers) == num_servers
    for key, ranges in parts_by_key(servers).items():
        ends = [0, *(end for _, end in ranges)]
        assert [start for start, _ in ranges] == ends[:-1]
        assert ends[-1] == sizes[key]  # type: ignore[call-overload]
    assert len(parts_by_key(servers)) == len(sizes)


@given(SIZES, st.integers(1, 12))
def test_no_server_has_much_more_than_the_mean(sizes: list[int], num_servers: int) -> None:
    total = sum(sizes)
    if total >= 20 * MIN_PART * num_servers:
        assert imbalance(place(dict(enumerate(sizes)), num_servers)) < 1.1


def test_one_large_layer_is_on_all_servers() -> None:
    servers = place({"embedding": 100_000_000, "bias": 400, "weight": 40_000}, 3)
    assert all(any(part.key == "embedding" for part in parts) for parts in servers)
    assert imbalance(servers) < 1.06


def test_all_workers_compute_the_same() -> None:
    sizes = {number: 1000 * number % 77_777 for number in range(50)}
    assert place(sizes, 4) == place(dict(sizes), 4)
    assert imbalance([[], []]) == 1.0


@given(st.integers(0, 3_000_000), st.sampled_from([1, 2, 4, 8]))
def test_slices_cover_a_value(numel: int, itemsize: int) -> None:
    spans = cut(numel, itemsize)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == numel
    assert all((end - start) * itemsize <= SLICE_BYTES for start, end in spans)
    assert len(spans) == max(1, -(-numel * itemsize // SLICE_BYTES))


@given(
    st.lists(SIZES, min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 7, 64, 300, 10_000]),
)
def test_keys_that_come_later_fill_the_servers_evenly(
    calls: list[list[int]], num_servers: int, itemsize: int, width: int
) -> None:
    placement, key, largest, numbers = Placement(num_servers), 0, 0, []
    for sizes in calls:
        sizes = [size // width * width for size in sizes]
        numels = {key + index: (size, itemsize, width) for index, size in enumerate(sizes)}
        key += len(sizes)
        fair = sum(sizes) * itemsize / num_servers
        largest = max(largest, MIN_PART, int(fair / 20))
        for each, parts in placement.add(numels).items():
            ends = [0, *(part.span[1] for part in parts)]
            assert [part.span[0] for part in parts] == ends[:-1] and ends[-1] == numels[each][0]
            spans = [part.span for part in parts]
            most = max(SLICE_BYTES, numels[each][0] * itemsize // 128) * (1 if width == 1 else 1.03)
            assert all((end - start) * itemsize <= most for start, end in spans)
            if width * itemsize * 40 <= MIN_PART:
                assert all(start % width == 0 for start, _ in spans)
            numbers += [part.number for part in parts]
    assert numbers == list(range(len(numbers)))
    total = sum(size // width * width for sizes in calls for size in sizes) * itemsize
    assert sum(placement.fill) == total
    if largest * 10 * num_servers <= total:
        assert max(placement.fill) * num_servers < 1.1 * total


@given(SIZES, st.integers(1, 5))
def test_whole_keys(sizes: list[int], num_servers: int) -> None:
    placed = Placement(num_servers, is_whole=True).add(
        {key: (size, 4, 3) for key, size in enumerate(sizes)}
    )
    assert [[part.span for part in parts] for parts in placed.values()] == [
        [(0, size)] for size in sizes
    ]


def test_a_key_of_some_slices_is_not_cut_small() -> None:
    assert [len(parts) for parts in place({"a": 1 << 20}, 2)] == [1, 1]
    assert [len(parts) for parts in place({"a": 32 << 20}, 2)] == [16, 16]
