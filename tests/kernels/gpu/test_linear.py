"""The skinny linears and what stands around cuBLAS's, against float64: every kernel, kind and count of rows."""

import pytest
import torch
import torch.nn.functional as F

from mstar.kernels.launch import runs_gluon
from mstar.kernels.linear import gated_linear, linear
from mstar.kernels.linear.gpu.ahead import Ahead
from mstar.kernels.linear.gpu.candidates import (
    CUBLAS,
    candidates,
    default,
    launches,
    step_candidates,
    variants,
    with_params,
)
from mstar.kernels.linear.gpu.run import Prepared, _counters, run_linear, run_residual, skinny_call
from mstar.kernels.norm import rms_norm
from mstar.kernels.registry import KINDS, ROW_BUCKETS, GemmKey, KernelChoice
from tests.support.linears import exact

EPS = 1e-6
# Of float32 sums of 141 products. Of what bf16 keeps 8 bits and fp16 11 (the interpreter cuts bf16 off where a GPU
# rounds, twice the error), twice in a residual and up to four times in a gate. Tensor cores cut off what they add;
# one rounding to fp16 would be 2e-4.
BOUNDS = {
    "plain": {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3},
    "norm": {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 9e-3},
    "residual": {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 1e-2},
    "gated": {torch.float32: 1e-6, torch.float16: 1.2e-3, torch.bfloat16: 2.5e-2},
    "f32": {torch.float32: 1e-6, torch.float16: 2e-5, torch.bfloat16: 2e-5},
}


def choice(kernel: str, **params: int) -> KernelChoice:
    return KernelChoice(kernel, tuple(sorted(params.items())))


FMA = choice("fma", BLOCK_N=8, BLOCK_K=256, UNROLL=1, num_warps=1)
FMA_PRELOAD = choice("fma", BLOCK_N=4, BLOCK_K=64, UNROLL=1, PRELOAD=1, TOUCH=1, AHEAD=1, num_warps=1)
FMA_LOOP = choice("fma", BLOCK_N=16, BLOCK_K=64, UNROLL=0, num_warps=2)
DOT = choice("dot", BLOCK_N=16, BLOCK_K=128, SPLIT_K=1, PREFETCH=1, num_warps=1, num_stages=2)
DOT_LOOP = choice("dot", BLOCK_N=32, BLOCK_K=64, SPLIT_K=1, PREFETCH=0, num_warps=2, num_stages=3)
DOT_NORM_FIRST = choice(
    "dot", BLOCK_N=32, BLOCK_K=64, SPLIT_K=1, PREFETCH=0, NORM_FIRST=1, num_warps=2, num_stages=2
)
# all of k in one tile, and the next kernel may start with this one
DOT_STRIP = choice("dot", BLOCK_N=16, BLOCK_K=512, SPLIT_K=1, PREFETCH=1, SOON=1, num_warps=2, num_stages=1)
DOT_SPLIT = choice("dot", BLOCK_N=32, BLOCK_K=32, SPLIT_K=3, PREFETCH=1, num_warps=2, num_stages=3)
MMA = choice("mma", BLOCK_N=16, BLOCK_K=128, SPLIT_K=1, num_warps=2)
MMA_LOOP = choice("mma", BLOCK_N=32, BLOCK_K=32, SPLIT_K=1, num_warps=1)
MMA_SPLIT = choice("mma", BLOCK_N=16, BLOCK_K=64, SPLIT_K=2, num_warps=2)
# of residuals: the parts of k are added up by a kernel of their own
DOT_SUM = choice("dot", BLOCK_N=32, BLOCK_K=32, SPLIT_K=3, PREFETCH=1, SUM_AFTER=1, num_warps=2, num_stages=3)
FMA_SUM = choice("fma", BLOCK_N=8, BLOCK_K=256, UNROLL=1, SUM_AFTER=1, num_warps=1)
MMA_SUM = choice("mma", BLOCK_N=16, BLOCK_K=64, SPLIT_K=2, SUM_AFTER=1, num_warps=2)
NAMES = {
    "fma": FMA, "fma-preload": FMA_PRELOAD, "fma-loop": FMA_LOOP, "dot": DOT, "dot-loop": DOT_LOOP,
    "dot-split": DOT_SPLIT,
    "dot-strip": DOT_STRIP, "mma": MMA, "mma-loop": MMA_LOOP, "mma-split": MMA_SPLIT,
    "dot-norm-first": DOT_NORM_FIRST, "fma-sum": FMA_SUM, "dot-sum": DOT_SUM, "mma-sum": MMA_SUM,
    "cublas": CUBLAS,
}  # fmt: skip
ROWS = {
    "fma": (1, 3, 8), "fma-preload": (1, 3), "fma-loop": (2, 5), "dot": (3, 16, 33, 64), "dot-loop": (2, 17, 63),
    "dot-split": (5, 33),
    "dot-norm-first": (3,), "dot-strip": (4, 17),
    "mma": (3, 16, 32), "mma-loop": (9,), "mma-split": (5,), "fma-sum": (1, 5), "dot-sum": (5, 64),
    "mma-sum": (5,),
    "cublas": (1, 65),
}  # fmt: skip


def arguments(kind: str, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Random x whose rows lie apart, weight, and what the kind needs; NaN between the rows of x and residual."""
    generator = torch.Generator().manual_seed(rows * 1000 + n)

    def apart(columns: int) -> torch.Tensor:
        whole = torch.full((rows, columns + 8), float("nan"))
        whole[:, :columns] = torch.randn(rows, columns, generator=generator)
        return whole.to(dtype).to(device)[:, :columns]

    weight = torch.randn((2 if kind == "gated" else 1) * n, k, generator=generator) / k**0.5
    return {
        "x": apart(k),
        "weight": weight.to(dtype).to(device),
        "norm": torch.rand(k, generator=generator).to(device) + 0.5 if kind in ("norm", "gated") else None,
        "eps": EPS,
        "residual": apart(n) if kind == "residual" else None,
    }


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_is_the_formula_where_nothing_is_a_multiple(device, name, kind, dtype):
    if name in ("dot-split", "mma-split") and kind in ("norm", "gated"):
        pytest.skip("a split goes with neither: test_what_does_not_fit_is_refused")
    if name == "dot-norm-first" and kind not in ("norm", "gated"):
        pytest.skip("without a norm it is dot-loop")
    if name.endswith("-sum") and kind != "residual":
        pytest.skip("no other kind adds parts up so: test_what_does_not_fit_is_refused")
    rows = ROWS[name] if dtype == torch.bfloat16 else ROWS[name][:1]
    for count in rows:
        given = arguments(kind, count, 19, 141, dtype, device)
        got = run_linear(NAMES[name], given.pop("x"), given.pop("weight"), kind=kind, **given)
        given = arguments(kind, count, 19, 141, dtype, device)
        assert got.dtype == (torch.float32 if kind == "f32" else dtype)
        assert relative(got, exact(kind, **given)) < BOUNDS[kind][dtype]
        if kind == "gated":
            want = gated_linear(given["x"], given["weight"], norm=given["norm"], eps=EPS)
        else:
            want = linear(out_f32=kind == "f32", **given)
        assert relative(got, want) < 2 * BOUNDS[kind][dtype]


@pytest.mark.parametrize("name", ["fma", "fma-loop", "dot", "dot-split", "mma", "mma-split"])
def test_stores_end_where_the_output_does(device, name):
    given = arguments("residual", 5, 37, 205, torch.bfloat16, device)
    whole = torch.full((7, 37), 3.0, dtype=torch.bfloat16, device=device)
    skinny_call(NAMES[name], kind="residual", out=whole[1:6], **given).start()
    assert relative(whole[1:6], exact("residual", **given)) < 1e-2
    assert torch.equal(whole[[0, 6]].float(), torch.full((2, 37), 3.0, device=device))


@pytest.mark.parametrize("name", ["fma", "dot", "dot-split", "mma"])
def test_a_row_does_not_depend_on_its_neighbours(device, name):
    given = arguments("f32", 7, 37, 205, torch.bfloat16, device)
    whole = run_linear(NAMES[name], given["x"], given["weight"], kind="f32")
    poisoned = given["x"].clone()
    poisoned[[0, 1, 3, 4, 5, 6]] = float("nan")
    alone = run_linear(NAMES[name], poisoned, given["weight"], kind="f32")
    assert torch.equal(alone[2], whole[2])
    assert alone[[0, 6]].isnan().all()


def test_split_counters_are_zero_again(device):
    given = arguments("plain", 3, 37, 205, torch.float32, device)
    first = run_linear(DOT_SPLIT, given["x"], given["weight"], kind="plain")
    assert not _counters(device, 1).any()
    assert torch.equal(run_linear(DOT_SPLIT, given["x"], given["weight"], kind="plain"), first)


def test_fp16_norm_takes_inputs_whose_product_with_the_multiplier_is_too_large(device):
    given = arguments("norm", 2, 37, 205, torch.float16, device)
    given["x"] *= 15000
    given["norm"] *= 6
    got = run_linear(DOT, given["x"], given["weight"], kind="norm", norm=given["norm"], eps=EPS)
    assert (given["x"].float() * given["norm"]).abs().max() > 65504
    assert relative(got, exact("norm", **given)) < BOUNDS["norm"][torch.float16]


def test_no_rows_and_too_many_rows(device):
    given = arguments("plain", 65, 37, 205, torch.float32, device)
    assert run_linear(FMA, given["x"][:0], given["weight"], kind="f32").shape == (0, 37)
    got = run_linear(DOT, given["x"], given["weight"], kind="plain")
    assert torch.equal(got, F.linear(given["x"], given["weight"]))


def test_what_does_not_fit_is_refused(device):
    given = arguments("gated", 9, 37, 205, torch.float32, device)
    x, weight, norm = given["x"], given["weight"], given["norm"]
    with pytest.raises(ValueError, match="8 rows, not 9"):
        run_linear(FMA, x, weight, kind="plain")
    with pytest.raises(ValueError, match="32 rows, not 33"):
        run_linear(MMA, torch.randn(33, 205, device=device), weight, kind="plain")
    with pytest.raises(ValueError, match="split"):
        run_linear(DOT_SPLIT, x, weight, kind="gated", norm=norm)
    with pytest.raises(ValueError, match="SUM_AFTER"):
        run_linear(DOT_SUM, x, weight, kind="plain")
    with pytest.raises(ValueError, match="needs a norm"):
        run_linear(CUBLAS, x, weight, kind="gated")
    with pytest.raises(ValueError, match="residual"):
        run_linear(CUBLAS, x, weight, kind="residual")
    with pytest.raises(ValueError, match="differ"):
        run_linear(CUBLAS, x, weight[:, 1:].contiguous(), kind="plain")
    with pytest.raises(ValueError, match="not contiguous"):
        run_linear(CUBLAS, x, torch.randn(205, 37, device=device).T, kind="plain")


def test_stream_is_refused_where_it_does_not_run_and_what_it_does_not_take(device):
    stream = choice("stream", BLOCK_N=64, BLOCK_K=128, SPLIT_K=2, num_stages=2, num_warps=4)
    given = arguments("gated", 3, 64, 128, torch.bfloat16, device)
    x, weight, norm = given["x"], given["weight"], given["norm"]
    here = runs_gluon(device)
    with pytest.raises(ValueError, match="adds up no parts" if here else "needs a GPU of Hopper's kind"):
        run_linear(stream, x, weight, kind="plain")
    with pytest.raises(ValueError, match="norms no rows" if here else "needs a GPU of Hopper's kind"):
        skinny_call(stream, x, weight, kind="gated", norm=norm, eps=EPS)
    if here:
        with pytest.raises(ValueError, match="multiples of 8"):
            run_linear(with_params(stream, SPLIT_K=1), x[:, :100], weight[:, :100].contiguous(), kind="plain")
        with pytest.raises(ValueError, match="bf16 and fp16"):
            run_linear(with_params(stream, SPLIT_K=1), x.float(), weight.float(), kind="plain")


SIZES = [
    (8224, 1024),
    (1024, 2048),
    (3584, 1024),
    (1024, 3584),
    (248320, 1024),
    (12352, 4096),
    (4096, 12288),
    (64, 64),
]


@pytest.mark.parametrize("n, k", SIZES)
def test_candidates_fit_and_hold_the_default(n, k):
    for rows in ROW_BUCKETS:
        for kind in KINDS:
            for dtype in ("bf16", "fp32"):
                key = GemmKey(kind, rows, n, k, dtype)
                found = candidates(key)
                assert found[0] == CUBLAS and default(key) in found
                assert len(found) == len(set(found)) <= 36
                few = kind in ("gated", "f32") and k >= 128  # where a tile of the liked ones fits
                fma_rows = 8 if dtype == "fp32" else 2 if few else 4
                kernel = "fma" if rows <= fma_rows else "dot" if rows <= 64 else "cublas"
                assert default(key).kernel == (kernel if dtype == "bf16" or kernel != "dot" else "cublas")
                for found_choice in found:
                    check_fit(found_choice, key)


@pytest.mark.parametrize("n, k", SIZES)
def test_a_steps_candidates_keep_the_habits_of_the_choice_they_replace(n, k):
    for rows in (1, 4, 16, 64):
        for kind in KINDS:
            key = GemmKey(kind, rows, n, k, "bf16")
            now = with_params(default(key), AHEAD=4, SOON=1)
            found = step_candidates(key, now)
            assert CUBLAS in found and len(found) == len(set(found))
            for each in found:
                params = dict(each.params)
                if each.kernel == "stream":
                    assert params["SOON"] and "AHEAD" not in params
                    continue
                assert each == CUBLAS or (params["AHEAD"], params["SOON"]) == (4, 1)
                if each.kernel in ("dot", "mma") and kind in ("norm", "gated") and rows >= 4:
                    assert params["NORM_FIRST"]
            for each in variants(key, now):
                assert each.kernel == now.kernel and each.params == tuple(sorted(each.params))
                assert each != now or dict(each.params)["AHEAD"] == 4
                assert 0 not in [
                    dict(each.params).get(name) for name in ("AHEAD", "SOON", "TOUCH", "PRELOAD")
                ]
    assert variants(key, CUBLAS) == []


def check_fit(found: KernelChoice, key: GemmKey) -> None:
    params = dict(found.params)
    assert found.params == tuple(sorted(found.params))
    if found.kernel == "cublas":
        assert launches(found, key) == {"norm": 2, "residual": 2, "gated": 3}.get(key.kind, 1)
        return
    norm_first = params.get("NORM_FIRST", 0) or (found.kernel == "stream" and key.kind in ("norm", "gated"))
    sum_after = params.get("SUM_AFTER", 0)
    assert launches(found, key) == 1 + norm_first + sum_after
    assert not sum_after or key.kind == "residual"
    assert not norm_first or key.kind in ("norm", "gated")
    item = 4 if key.dtype == "fp32" else 2
    if found.kernel == "fma":
        assert key.rows <= 8
        # all warps along k: see candidates
        assert params["BLOCK_K"] % (32 * params["num_warps"] * 16 // item) == 0
    elif found.kernel == "stream":
        assert key.rows <= 64 and key.dtype != "fp32" and sum_after == (key.kind == "residual")
        assert params["SPLIT_K"] == 1 or key.kind == "residual"
        assert 64 <= params["BLOCK_N"] == 16 * params["num_warps"] or params["BLOCK_N"] == 128
        rows = params["BLOCK_N"] * (2 if key.kind == "gated" else 1) + max(8, key.rows)
        assert params["num_stages"] * rows * params["BLOCK_K"] * item <= 227 << 10
    elif found.kernel == "mma":
        assert 2 <= key.rows <= 32 and key.dtype != "fp32"
        assert params["SPLIT_K"] == 1 or key.kind not in ("norm", "gated")
        assert params["BLOCK_K"] % (32 * params["num_warps"]) == 0
        assert key.k % (params["BLOCK_K"] * params["SPLIT_K"]) == 0
    else:
        assert key.rows <= 64
        assert params["SPLIT_K"] == 1 or key.kind not in ("norm", "gated")
        rows = params["BLOCK_N"] * (2 if key.kind == "gated" else 1) + max(8, key.rows)
        assert params["num_stages"] * rows * params["BLOCK_K"] * item <= 227 << 10


@pytest.mark.parametrize("name", ["fma", "dot", "dot-split", "mma", "mma-split"])
@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("kind", ["norm", "gated"])
def test_what_a_residual_prepares_serves_the_norm_behind_it(device, name, rows, kind):
    given = arguments("residual", rows, 205, 141, torch.bfloat16, device)
    behind = arguments(kind, rows, 19, 205, torch.bfloat16, device)
    norm = behind["norm"]
    ahead = Ahead(given["weight"], norm=norm)
    out, made = run_residual(NAMES[name], given["x"], given["weight"], given["residual"], ahead, scaled=True)
    assert torch.equal(out.float(), run_linear(NAMES[name], kind="residual", **given).float())
    assert made is not None and made.scaled is not None and made.squares.shape[1] == rows
    assert relative(made.squares.sum(0), out.double().square().sum(1)) < 1e-6
    # rounded on a GPU, cut off in the interpreter
    assert ((made.scaled.float() - out.float() * norm).abs() <= 2.0**-7 * (out.float() * norm).abs()).all()

    behind["x"] = out
    for choice in (DOT, MMA):
        got = run_linear(choice, kind=kind, known=Prepared(made.squares), **behind)
        assert relative(got, exact(kind, **behind)) < BOUNDS[kind][torch.bfloat16]
        assert relative(got, run_linear(choice, kind=kind, **behind)) < BOUNDS[kind][torch.bfloat16]
        # they are what is used: twice the squares is a norm larger by the root of two
        doubled = run_linear(choice, kind=kind, known=Prepared(2 * made.squares), **behind)
        assert relative(doubled, got) > 0.1
        # products that are ready give the same bytes; those of another norm are left alone
        assert torch.equal(run_linear(choice, kind=kind, known=made, **behind).float(), got.float())
        other = Prepared(made.squares, 2 * made.scaled, norm.clone())
        assert torch.equal(run_linear(choice, kind=kind, known=other, **behind).float(), got.float())
    first = run_linear(DOT_NORM_FIRST, kind=kind, known=made, **behind)
    assert relative(first, exact(kind, **behind)) < BOUNDS[kind][torch.bfloat16]


@pytest.mark.parametrize("name", ["cublas", "fma-sum", "dot-sum", "mma-sum"])
@pytest.mark.parametrize("kind", ["norm", "gated"])
def test_a_kernel_that_adds_up_whole_rows_norms_them_for_what_is_behind(device, name, kind):
    given = arguments("residual", 5, 205, 141, torch.bfloat16, device)
    behind = arguments(kind, 5, 19, 205, torch.bfloat16, device)
    norm = behind["norm"]
    out, made = run_residual(
        NAMES[name],
        given["x"],
        given["weight"],
        given["residual"],
        Ahead(given["weight"], norm=norm, eps=EPS),
    )
    assert torch.equal(out.float(), run_linear(NAMES[name], kind="residual", **given).float())
    assert relative(out, exact("residual", **given)) < BOUNDS["residual"][torch.bfloat16]
    want = rms_norm(out, norm, EPS)
    # rounded on a GPU, cut off in the interpreter
    assert ((made.normed.float() - want.float()).abs() <= 2.0**-7 * want.float().abs()).all()

    behind["x"] = out
    for choice in (FMA, DOT, MMA, CUBLAS):
        alone = run_linear(choice, kind=kind, **behind)
        got = run_linear(choice, kind=kind, known=made, **behind)
        assert relative(got, exact(kind, **behind)) < BOUNDS[kind][torch.bfloat16]
        # what is ready is used, and no other norm's
        twice = Prepared(multiplier=norm, normed=2 * made.normed)
        assert relative(run_linear(choice, kind=kind, known=twice, **behind), got) > 0.5
        other = Prepared(multiplier=norm.clone(), normed=2 * made.normed)
        assert torch.equal(run_linear(choice, kind=kind, known=other, **behind).float(), alone.float())


@pytest.mark.parametrize("name", ["dot", "mma"])
@pytest.mark.parametrize("tiles", [1, 63, 300])
def test_squares_come_in_few_parts_or_in_more_than_a_thread_holds(device, name, tiles):
    given = arguments("norm", 8, 19, 205, torch.bfloat16, device)
    shares = torch.rand(tiles, 8, generator=torch.Generator().manual_seed(tiles)).to(device)
    squares = given["x"].float().square().sum(1) * shares / shares.sum(0)
    got = run_linear(NAMES[name], kind="norm", known=Prepared(squares), **given)
    assert relative(got, exact("norm", **given)) < BOUNDS["norm"][torch.bfloat16]


def test_rows_above_64_are_normed_where_they_are_added_up(device):
    given = arguments("residual", 65, 37, 205, torch.float32, device)
    norm = torch.rand(37, device=device) + 0.5
    ahead = Ahead(given["weight"], norm=norm, eps=EPS)
    out, made = run_residual(FMA, given["x"], given["weight"], given["residual"], ahead)
    assert relative(out, exact("residual", **given)) < 1e-6
    assert relative(made.normed, rms_norm(out, norm, EPS)) < 1e-6
    assert run_residual(FMA, given["x"][:0], given["weight"], given["residual"][:0])[0].shape == (0, 37)
