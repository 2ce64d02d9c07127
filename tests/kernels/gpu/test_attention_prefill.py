"""The prefill path's kernels against float64 and the torch reference: chunks, offsets, borders, poison."""

import pytest
import torch

from mstar.kernels.attention import attention_prefill
from mstar.kernels.attention.gpu.run import attention_gpu
from tests.support.attention import paged, random_weights, relative_error

# Relative to a row's norm. bfloat16 rounds the softmax's weights and twice the result, 2^-9 each at most; the
# interpreter cuts it off instead, q and k too: 2^-7 each, all one way.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 6e-3 if torch.cuda.is_available() else 3e-2}


def errors(case, out):
    borders = case.rows.host_cu_rows
    return [
        relative_error(out[borders[index] : borders[index + 1]], case.expected(index))
        for index in range(case.rows.sequences)
    ]


CASES = [
    ((4, 1), [0, 0, 0], [1, 2, 63]),
    ((6, 1), [0, 37], [65, 4]),
    ((4, 2), [96, 15, 1], [64, 1, 9]),
]
# in the interpreter, where the longer ones take ten seconds, bf16 differs from float32 in its roundings alone
ROUNDED = CASES if torch.cuda.is_available() else CASES[:1]


@pytest.mark.parametrize(
    "heads, starts, counts, dtype",
    [*((*case, torch.float32) for case in CASES), *((*case, torch.bfloat16) for case in ROUNDED)],
)
def test_chunks_see_their_past_and_themselves(device, heads, starts, counts, dtype):
    generator = torch.Generator().manual_seed(sum(counts))
    weights = random_weights(*heads, 16, 8, generator)
    case = paged(
        weights, starts, counts, dtype=dtype, device=device, generator=generator, decode=False, columns=11
    )
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    assert out.dtype == dtype and out.shape == (sum(counts), heads[0] * 16)
    assert max(errors(case, out)) < BOUNDS[dtype]


def test_prefill_and_its_last_rows_are_the_reference_in_float32(device):
    generator = torch.Generator().manual_seed(5)
    weights = random_weights(4, 2, 32, 8, generator)
    case = paged(
        weights,
        [33, 0, 70],
        [3, 17, 1],
        dtype=torch.float32,
        device=device,
        generator=generator,
        decode=False,
    )
    k_cache, v_cache = case.k_cache.nan_to_num(nan=0.0), case.v_cache.nan_to_num(nan=0.0)
    before = case.k_cache.clone(), case.v_cache.clone()
    want = attention_prefill(case.proj, case.weights, k_cache, v_cache, case.rows)
    out = attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows)
    assert relative_error(out, want.double()) < 3e-6
    torch.testing.assert_close(case.k_cache.nan_to_num(nan=0.0), k_cache, rtol=1e-5, atol=1e-6)
    assert torch.equal(case.v_cache.nan_to_num(nan=0.0), v_cache)
    last = attention_gpu(case.proj, case.weights, *before, case.rows, last_only=True)
    assert relative_error(last, want[[2, 19, 20]].double()) < 3e-6
    assert torch.equal(
        before[0].nan_to_num(nan=7.0), case.k_cache.nan_to_num(nan=7.0)
    )  # all rows are written
    assert torch.equal(before[1].nan_to_num(nan=7.0), case.v_cache.nan_to_num(nan=7.0))


def test_chunks_one_after_another_give_what_one_gives(device):
    generator = torch.Generator().manual_seed(6)
    weights = random_weights(4, 1, 16, 8, generator)
    whole = paged(weights, [0], [80], dtype=torch.float32, device=device, generator=generator, decode=False)
    expected = whole.expected(0)
    start = 0
    for count in (31, 1, 48):
        part = paged(
            weights, [start], [count], dtype=torch.float32, device=device, generator=generator, decode=False
        )
        part.rows.block_tables.copy_(whole.rows.block_tables[:, : part.rows.block_tables.shape[1]])
        proj = whole.proj[start : start + count]
        out = attention_gpu(proj, whole.weights, whole.k_cache, whole.v_cache, part.rows)
        assert relative_error(out, expected[start : start + count]) < 3e-6
        start += count
