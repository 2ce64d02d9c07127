"""The attention kernels on a GPU at the models' shapes, against float64; skipped where there is none."""

import pytest
import torch

from mstar.kernels.attention.gpu.qkv import qkv_norm_rope_cache
from mstar.kernels.attention.gpu.run import attention_gpu
from tests.support.attention import BLOCK, normed_and_turned, paged, random_weights, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: kernels are not run here")

MODELS = {"0.8B": (8, 2), "9B": (16, 4), "27B": (24, 4)}
DEVICE = torch.device("cuda")
# Relative to a row's norm. bfloat16 rounds the softmax's weights and twice the result, 2^-9 each at most, and where
# float32 and float64 lie on two sides of a tie, q and k differ by a step. float32 sums up to 16,384 terms.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def make(model, starts, counts, dtype, *, decode, seed=0, columns=0):
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(*MODELS[model], 256, 64, generator)
    return paged(
        weights,
        starts,
        counts,
        dtype=dtype,
        device=DEVICE,
        generator=generator,
        decode=decode,
        columns=columns,
    )


def run(case, last_only=False):
    return attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows, last_only)


def check(case, out):
    for sequence in range(case.rows.sequences):
        begin, end = case.rows.host_cu_rows[sequence : sequence + 2]
        assert relative_error(out[begin:end], case.expected(sequence)) < BOUNDS[case.proj.dtype]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 2, 4, 9])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 511, 8192, 16384])
def test_decode_of_one_sequence_matches_float64(model, count, keys):
    case = make(model, [max(0, keys - count)], [count], torch.bfloat16, decode=True, seed=keys)
    check(case, run(case))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 4])
def test_decode_of_sixteen_sequences_of_all_lengths_matches_float64(model, count):
    starts = [0, 1, 14, 15, 16, 17, 63, 64, 65, 127, 511, 1000, 2049, 4096, 8191, 16380]
    case = make(model, starts, [count] * 16, torch.bfloat16, decode=True, columns=1100)
    check(case, run(case))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("sequences", [17, 33, 65])
def test_decode_of_many_sequences_of_uneven_lengths_matches_float64(sequences, count):
    """Of two KV heads: up to 64 pairs, up to 128, and more."""
    starts = [(place * 37) % 200 for place in range(sequences - 2)] + [2049, 4096]
    case = make("0.8B", starts, [count] * sequences, torch.bfloat16, decode=True, columns=300)
    check(case, run(case))


def test_decode_of_nine_rows_of_many_sequences_matches_float64():
    case = make(
        "27B", [place * 61 for place in range(16)], [9] * 16, torch.bfloat16, decode=True, columns=100
    )
    check(case, run(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_decode_in_other_dtypes_matches_float64(dtype, count):
    case = make("0.8B", [3, 700, 5000], [count] * 3, dtype, decode=True)
    check(case, run(case))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "starts, counts",
    [([0], [1]), ([0], [2]), ([0], [63]), ([0], [64]), ([0], [65]), ([0], [2048]), ([5001], [1000]),
     ([0, 48, 777, 16], [130, 1, 300, 17])],
)  # fmt: skip
def test_prefill_matches_float64(model, starts, counts):
    case = make(model, starts, counts, torch.bfloat16, decode=False, seed=sum(counts))
    check(case, run(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill_in_other_dtypes_matches_float64(dtype):
    case = make("0.8B", [0, 100], [200, 77], dtype, decode=False)
    check(case, run(case))


@pytest.mark.parametrize("model", MODELS)
def test_last_rows_of_prefill_are_those_of_all_rows(model):
    case = make(model, [0, 48, 777], [130, 1, 300], torch.bfloat16, decode=False)
    last = run(case, last_only=True)
    want = torch.cat([case.expected(sequence)[-1:] for sequence in range(3)])
    assert relative_error(last, want) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("position", [32_767, 65_537, 105_615, 262_143, 524_289, 999_999])
def test_far_positions_turn_by_their_float32_angle(position):
    """The angle is one float32 product; its sine and cosine are within two steps of float32."""
    case = make("0.8B", [0], [1], torch.float32, decode=True, seed=position)
    case.rows.starts.fill_(position)
    columns = position // BLOCK + 1
    table = case.rows.block_tables.repeat(1, columns)
    rows = type(case.rows)(
        **{name: getattr(case.rows, name) for name in case.rows.__slots__} | {"block_tables": table}
    )
    q = qkv_norm_rope_cache(case.proj, case.weights, case.k_cache, case.v_cache, rows)
    w, at = case.weights, torch.tensor([position], device=DEVICE)
    q_in = case.proj[:, : 2 * w.q_heads * 256].unflatten(1, (w.q_heads, 2, 256))[:, :, 0]
    k_in = case.proj[:, 2 * w.q_heads * 256 :].unflatten(1, (2, w.kv_heads, 256))[:, 0]
    k = case.k_cache[int(table[0, 0]), :, :, position % BLOCK]
    assert relative_error(q, normed_and_turned(q_in, w.q_norm, at, w)) < 1e-6
    assert relative_error(k, normed_and_turned(k_in, w.k_norm, at, w)[0]) < 1e-6


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("others", [0, 21])
def test_a_graph_replayed_at_other_lengths_gives_what_eager_gives(others, last_only):
    """The grid is pinned at capture; lengths, tables and rows are read on the device.

    Of three sequences a kernel merges the segments, of 24 the program that ends last.
    """
    more = [place * 31 for place in range(others)]
    count = 3 + others
    case = make("9B", [8180, 40, 3000, *more], [4] * count, torch.bfloat16, decode=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(case, last_only)
    stream.synchronize()
    case.rows.starts.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, last_only)
    # each shorter than the ones before, whose rows were written past its end
    for starts in (
        [8180, 40, 3000, *more],
        [1234, 17, 2990, *more],
        [5, 0, 15, *[place // 2 for place in more]],
    ):
        case.rows.starts.copy_(torch.tensor(starts))
        case.proj.copy_(torch.randn_like(case.proj))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        assert torch.equal(run(case, last_only), replayed)
        assert not replayed.isnan().any()
        expected = case_at(case, starts)
        got = replayed if last_only else replayed.unflatten(0, (count, 4))[:, -1]
        assert relative_error(got, expected) < BOUNDS[torch.bfloat16]


def case_at(case, starts):
    """What the last row of each sequence gives when its sequence is only `starts` long."""
    results = []
    for sequence, start in enumerate(starts):
        k, v = case.past[sequence]
        borders = case.rows.host_cu_rows[sequence : sequence + 2]
        part = type(case)(
            case.weights,
            case.k_cache,
            case.v_cache,
            type(case.rows)(
                **{name: getattr(case.rows, name) for name in case.rows.__slots__}
                | {"host_cu_rows": borders, "host_starts": (start,)}
            ),
            case.proj,
            [(k[:start], v[:start])],
        )
        results.append(part.expected(0)[-1:])
    return torch.cat(results)
