"""The decode path's kernels against float64 and the torch reference: windows, segments, sinks, poison."""

from dataclasses import replace

import pytest
import torch

from mstar.kernels.attention import attention_decode
from mstar.kernels.attention.gpu import decode
from mstar.kernels.attention.gpu.decode import DecodeChoice, attend_decode, default_choice
from mstar.kernels.attention.gpu.qkv import qkv_norm_rope_cache
from mstar.kernels.attention.gpu.run import attention_gpu
from tests.support.attention import BLOCK, paged, random_weights, relative_error

# Relative to a row's norm. bfloat16 rounds the softmax's weights and twice the result, 2^-9 each at most; the
# interpreter cuts it off instead, q and k too: 2^-7 each, all one way.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 6e-3 if torch.cuda.is_available() else 3e-2}


def check(case, out, dtype):
    end = 0
    for sequence in range(len(case.past)):
        begin, end = case.rows.host_cu_rows[sequence : sequence + 2]
        assert relative_error(out[begin:end], case.expected(sequence)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads, count", [((4, 1), 1), ((6, 1), 2), ((4, 2), 4)])
def test_decode_rows_see_their_past_and_themselves(device, heads, count, dtype):
    generator = torch.Generator().manual_seed(heads[0] * 10 + count)
    weights = random_weights(*heads, 16, 8, generator)
    starts = [0, 15, 230]
    case = paged(
        weights, starts, [count] * 3, dtype=dtype, device=device, generator=generator, decode=True, padding=1
    )
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    assert out.dtype == dtype and out.shape == (4 * count, heads[0] * 16)
    check(case, out, dtype)
    for sequence, start in enumerate(starts):  # what was written is k and v of the rows, and nothing else is
        _, _, k, v, positions = case.parts(sequence)
        own = case.rows.block_tables[sequence, positions // BLOCK].long()
        assert relative_error(case.k_cache[own, :, :, positions % BLOCK], k) < BOUNDS[dtype]
        assert torch.equal(case.v_cache[own, :, positions % BLOCK].double(), v)
        k_cache[own, :, :, positions % BLOCK] = case.k_cache[own, :, :, positions % BLOCK]
        v_cache[own, :, positions % BLOCK] = case.v_cache[own, :, positions % BLOCK]
        assert positions[0] == start
    assert torch.equal(case.k_cache[1:].nan_to_num(nan=7.0), k_cache[1:].nan_to_num(nan=7.0))
    assert torch.equal(case.v_cache[1:].nan_to_num(nan=7.0), v_cache[1:].nan_to_num(nan=7.0))


def test_decode_is_the_reference_in_float32(device):
    generator = torch.Generator().manual_seed(5)
    weights = random_weights(4, 2, 32, 8, generator)
    case = paged(
        weights, [33, 70], [3, 3], dtype=torch.float32, device=device, generator=generator, decode=True
    )
    k_cache, v_cache = case.k_cache.nan_to_num(nan=0.0), case.v_cache.nan_to_num(nan=0.0)
    want = attention_decode(case.proj, case.weights, k_cache, v_cache, case.rows)
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    assert relative_error(out, want.double()) < 3e-6
    last = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows, last_only=True)
    assert relative_error(last, want[[2, 5]].double()) < 3e-6


def test_sequences_may_name_their_rows_of_a_larger_table(device):
    generator = torch.Generator().manual_seed(6)
    weights = random_weights(4, 1, 16, 8, generator)
    case = paged(
        weights, [20, 100, 31], [2] * 3, dtype=torch.float32, device=device, generator=generator, decode=True,
        columns=12, padding=1, slots=True,
    )  # fmt: skip
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    check(case, out, torch.float32)


def test_rows_past_the_table_go_to_the_sink_and_harm_nobody(device):
    generator = torch.Generator().manual_seed(8)
    weights = random_weights(4, 1, 16, 8, generator)
    case = paged(
        weights,
        [30, 20],
        [4] * 2,
        dtype=torch.float32,
        device=device,
        generator=generator,
        decode=True,
        columns=2,
    )  # 32 keys: two rows of the first sequence have a place, two do not
    k_cache = case.k_cache.clone()
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    assert relative_error(out[:2], case.expected(0)[:2]) < 3e-6
    assert relative_error(out[4:], case.expected(1)) < 3e-6
    changed = (case.k_cache.nan_to_num(nan=7.0) != k_cache.nan_to_num(nan=7.0)).flatten(1).any(1)
    allowed = {0, int(case.rows.block_tables[0, 1]), int(case.rows.block_tables[1, 1])}
    assert set(changed.nonzero()[:, 0].tolist()) == allowed
    assert not torch.equal(case.k_cache[0], k_cache[0])


def test_a_surplus_row_changes_no_row_before_it(device):
    generator = torch.Generator().manual_seed(9)
    weights = random_weights(4, 1, 16, 8, generator)
    case = paged(
        weights, [90], [4], dtype=torch.float32, device=device, generator=generator, decode=True, columns=7
    )
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    alone = replace(case.rows, rows_per_seq=2, cu_rows=torch.tensor([0, 2]).to(device), host_cu_rows=(0, 2))
    two = attention_gpu(case.proj[:2], case.weights, case.k_cache, case.v_cache, alone)
    assert relative_error(out[:2], two.double()) < 1e-6


@pytest.mark.parametrize("position", [32_769, 262_143, 999_999])
def test_far_positions_turn_by_their_float32_angle(device, position):
    generator = torch.Generator().manual_seed(position)
    weights = random_weights(2, 1, 32, 16, generator)
    case = paged(weights, [0], [1], dtype=torch.float32, device=device, generator=generator, decode=True)
    rows = replace(case.rows, starts=torch.tensor([position]).to(device), host_starts=(position,))
    rows = replace(rows, block_tables=rows.block_tables.repeat(1, position // BLOCK + 1))
    case = replace(case, rows=rows)
    q = qkv_norm_rope_cache(case.proj, case.weights, case.k_cache, case.v_cache, rows)
    assert relative_error(q, case.parts(0)[0]) < 1e-6
    block, offset = int(rows.block_tables[0, 0]), position % BLOCK
    assert relative_error(case.k_cache[block, :, :, offset], case.parts(0)[2][0]) < 1e-6


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "past, programs, cut, count, heads",
    [
        ((300, 5), 6, (4, 1), 1, (4, 1)),
        ((40, 300, 31), 6, (1, 4, 1), 3, (4, 1)),
        ((70, 70, 70), 6, (2, 2, 2), 1, (12, 2)),
        ((40, 40, 40), 6, (1, 1, 1), 1, (4, 1)),
        ((5, 5, 300, 5, 5), 5, (1, 1, 3, 1, 1), 1, (12, 2)),  # two programs have two segments
    ],
)
def test_keys_are_cut_by_all_lengths_and_the_rows_are_the_same(
    device, monkeypatch, past, programs, cut, count, apart, heads
):
    monkeypatch.setattr(decode, "multiprocessors", lambda device: programs * heads[1])
    case = uneven(device, heads, list(past), count, columns=20)
    arrivals = torch.zeros(len(past) * heads[1], dtype=torch.int32, device=device)
    attend(case, DecodeChoice(block_n=32, least_keys=64, programs=1, apart=apart), arrivals)
    want = [0 if parts == 1 or apart else parts for parts in cut for _ in range(heads[1])]
    assert arrivals.tolist() == want


def uneven(device, heads, past, count, columns):
    generator = torch.Generator().manual_seed(8)
    weights = random_weights(*heads, 16, 8, generator)
    counts, dtype = [count] * len(past), torch.float32
    return paged(
        weights, past, counts, dtype=dtype, device=device, generator=generator, decode=True, columns=columns
    )


def attend(case, choice, arrivals):
    q = qkv_norm_rope_cache(case.proj, case.weights, case.k_cache, case.v_cache, case.rows, arrivals)
    out = attend_decode(
        q, case.proj, case.weights, case.k_cache, case.v_cache, case.rows, choice=choice, arrivals=arrivals
    )
    check(case, out, torch.float32)


def test_how_many_pairs_there_are_says_how_keys_are_cut(device):
    few, some, many, most = (default_choice(torch.bfloat16, 16, pairs) for pairs in (2, 32, 128, 256))
    assert (few.programs, some.programs, many.programs, most.programs) == (1, 2, 1, 2)
    assert [choice.apart for choice in (few, some, many, most)] == [True, True, False, False]
    assert (some.block_n, most.block_n) == (32, 32)
    assert default_choice(torch.bfloat16, 64, 128).block_n == 32  # many rows leave no room for larger tiles
    if not torch.version.hip:
        assert many.block_n == 64
