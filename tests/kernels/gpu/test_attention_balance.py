"""Who has which keys where lengths differ, against what that must be."""

from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl

from mstar.kernels.attention.gpu.balance import cut, segment_at, shares_of

BLOCK_N = 64


@triton.jit
def _places(
    out, starts, cu_rows, sequences, most_keys, shares,
    ROWS: tl.constexpr, LAST_ONLY: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    sequence, segment, count, begin, end, start, segments = segment_at(
        at, starts, cu_rows, sequences, most_keys, shares, ROWS, LAST_ONLY, LEAST, BLOCK_N, PADDED
    )
    tl.store(out + at * 7, sequence)
    tl.store(out + at * 7 + 1, segment)
    tl.store(out + at * 7 + 2, count)
    tl.store(out + at * 7 + 3, begin)
    tl.store(out + at * 7 + 4, end)
    tl.store(out + at * 7 + 5, start)
    tl.store(out + at * 7 + 6, segments)


@triton.jit
def _counts(
    out, starts, sequences, most_keys, shares,
    ROWS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    _, count, _, segments = cut(
        starts, starts, sequences, most_keys, shares, ROWS, False, LEAST, BLOCK_N, PADDED
    )
    tl.store(out + tl.arange(0, PADDED), count)
    tl.store(out + PADDED, segments)


def counts(starts, shares, least, device):
    """How many segments each sequence has: one program says it of all."""
    padded = triton.next_power_of_2(len(starts))
    out = torch.full((padded + 1,), -1, dtype=torch.int32, device=device)
    _counts[(1,)](
        out, torch.tensor(starts, device=device), len(starts), 1 << 20, shares,
        ROWS=1, LEAST=least, BLOCK_N=BLOCK_N, PADDED=padded,
    )  # fmt: skip
    found = out.tolist()
    assert sum(found[:-1]) == found[-1]
    return found[: len(starts)]


def places(starts, rows, shares, least, device, most_keys=1 << 20, chunks=None):
    """(sequence, segment, count, begin, end) of each segment; starts, and the surplus places, are checked here.

    chunks: rows of each sequence in a prefill part, the last of which attends.
    """
    programs = len(starts) + shares + 1
    cu_rows = torch.tensor([0, *accumulate(chunks or [rows] * len(starts))], device=device)
    out = torch.full((programs, 7), -1, dtype=torch.int32, device=device)
    _places[(programs,)](
        out, torch.tensor(starts, device=device), cu_rows, len(starts), most_keys, shares,
        ROWS=rows, LAST_ONLY=chunks is not None, LEAST=least, BLOCK_N=BLOCK_N,
        PADDED=triton.next_power_of_2(len(starts)),
    )  # fmt: skip
    found = out.tolist()
    (segments,) = {place[6] for place in found}
    assert len(starts) <= segments <= len(starts) + shares
    for place in found[segments:]:
        assert 0 <= place[0] < len(starts)  # may be loaded from, and is not done
    first = [start + chunk - 1 for start, chunk in zip(starts, chunks or [1] * len(starts), strict=True)]
    assert all(place[5] == first[place[0]] for place in found[:segments])
    return [tuple(place[:5]) for place in found[:segments]]


@pytest.mark.parametrize("seed", range(4))
def test_every_key_belongs_to_one_segment_and_none_has_many_more_than_its_share(device, seed):
    generator = torch.Generator().manual_seed(seed)
    sequences = [1, 5, 16, 33][seed]
    long = 10 ** int(torch.randint(2, 5, (), generator=generator))
    starts = torch.randint(0, long, (sequences,), generator=generator).tolist()
    rows, shares, least = 1 + seed % 4, 3 + 11 * seed, (128, 512)[seed % 2]
    tiles = [-(-(start + rows) // BLOCK_N) for start in starts]
    most = max(least // BLOCK_N, -(-sum(tiles) // shares))
    covered = [0] * sequences
    found = places(starts, rows, shares, least, device)
    several = [place[2] > 1 for place in found]
    assert several == sorted(several, reverse=True)
    for sequence, segment, count, begin, end in found:
        assert begin % BLOCK_N == 0 and begin == covered[sequence] < end <= begin + most * BLOCK_N
        assert count == -(-tiles[sequence] // most) and segment < count
        covered[sequence] = end
    assert covered == [start + rows for start in starts]


@pytest.mark.parametrize(
    "sequences, programs, parts",
    [
        (64, 66, 1),
        (48, 66, 1),
        (32, 66, 2),
        (16, 66, 4),
        (16, 132, 8),
        (8, 132, 16),
        (4, 132, 32),
        (1, 66, 66),
    ],
)
def test_sequences_of_one_length_are_cut_as_far_as_programs_run_at_once(device, sequences, programs, parts):
    shares = shares_of(sequences, programs)
    for tiles in (528, 1056):
        assert counts([tiles * BLOCK_N - 1] * sequences, shares, 512, device) == [parts] * sequences
    assert counts([200] * sequences, shares, 512, device) == [1] * sequences


def test_no_program_has_two_segments_while_two_of_each_sequence_find_one(device):
    generator = torch.Generator().manual_seed(9)
    for sequences, programs in ((2, 5), (5, 66), (16, 132), (9, 33)):
        starts = (10 ** (1 + 3 * torch.rand(sequences, generator=generator))).long().tolist()
        shares = programs - sequences + 1
        assert shares_of(sequences, programs) >= shares
        assert sum(counts(starts, shares, BLOCK_N, device)) <= programs


def test_a_long_sequence_among_short_ones_is_cut_and_they_are_not(device):
    found = places([200] * 63 + [8191], 1, shares_of(64, 66), 512, device)
    assert [place[2] for place in found] == [16] * 16 + [1] * 63
    assert {place[4] - place[3] for place in found[:16]} == {512}
    assert [place[0] for place in found] == [63] * 16 + list(range(63))


def test_lengths_that_differ_by_a_quarter_at_most_are_not_cut(device):
    starts = [4000 + 32 * place for place in range(32)] * 2
    assert counts(starts, shares_of(64, 66), 512, device) == [1] * 64


def test_a_prefill_parts_last_rows_see_their_chunks_and_padding_sequences_have_a_segment_of_no_keys(device):
    found = places([100, 0, 700, 0], 1, 9, 64, device, chunks=[30, 64, 1, 0])
    keys = {0: 130, 1: 64, 2: 701, 3: 0}
    assert {sequence: max(place[4] for place in found if place[0] == sequence) for sequence in keys} == keys
    assert [place for place in found if place[0] == 3] == [(3, 0, 1, 0, 0)]


def test_what_is_past_the_table_is_nobodys(device):
    assert places([5000], 1, 1, 64, device, most_keys=128) == [(0, 0, 1, 0, 128)]
