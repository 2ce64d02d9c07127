"""Entries of a table that name "stream": what its launch would not take, or not end with, is refused at the load."""

from __future__ import annotations

import json

import pytest

from mstar.kernels.registry import GemmKey, KernelChoice, read_table

STACK = {"torch": "2.11", "triton": "3.6"}
RESIDUAL = "residual-r8-n1024-k2048-bf16"
STREAM_PARAMS = {"BLOCK_K": 128, "BLOCK_N": 64, "SPLIT_K": 1, "num_stages": 4, "num_warps": 4}


@pytest.mark.parametrize(
    "name, changed, said",
    [
        (RESIDUAL, {"SUM_AFTER": 1, "SOON": 1}, ""),
        (RESIDUAL, {"SUM_AFTER": 1, "SPLIT_K": 4}, ""),
        ("norm-r8-n1024-k2048-bf16", {}, ""),
        ("norm-r8-n1024-k2048-bf16", {"CARVEOUT": 58}, ""),
        ("norm-r8-n1024-k128-bf16", {"num_stages": 1}, ""),  # all of k
        (RESIDUAL, {}, "adds up no parts"),
        (RESIDUAL, {"SUM_AFTER": 2}, "0 or 1"),
        (RESIDUAL, {"SUM_AFTER": 1, "CARVEOUT": 101}, "1 to 100"),
        (RESIDUAL, {"SUM_AFTER": 1, "AHEAD": 4}, "not the parameters"),
        (RESIDUAL, {"SUM_AFTER": 1, "BLOCK_N": 32}, "16 outputs a warp"),
        (RESIDUAL, {"SUM_AFTER": 1, "BLOCK_N": 512}, "to 256 in all"),
        (RESIDUAL, {"SUM_AFTER": 1, "BLOCK_K": 32}, "64 values of k"),
        (RESIDUAL, {"SUM_AFTER": 1, "num_warps": 8}, "16 outputs a warp"),
        ("norm-r8-n1024-k2048-bf16", {"num_stages": 1}, "two tiles or more"),  # it would wait for ever
        ("gated1-r64-n1024-k2048-bf16", {"num_stages": 5, "BLOCK_K": 256}, "fits in 227 KiB"),
        ("norm-r8-n1024-k2044-bf16", {}, "k in 8s"),
        ("norm-r8-n1024-k2048-bf16", {"SPLIT_K": 2}, "k is not split"),
        ("plain-r8-n1024-k2048-bf16", {"SPLIT_K": 2}, "adds up no parts"),
        ("f32-r8-n1024-k2048-bf16", {"SPLIT_K": 2}, "adds up no parts"),
    ],
)
def test_what_stream_does_not_take_is_refused_and_says_why(tmp_path, monkeypatch, name, changed, said):
    candidates = pytest.importorskip("mstar.kernels.linear.gpu.candidates")
    stream = pytest.importorskip("mstar.kernels.linear.gpu.stream")
    monkeypatch.setattr(stream, "usable", lambda: True)
    key = GemmKey.parse(name)
    if key.k % 8:  # nobody proposes it
        known = GemmKey(key.kind, key.rows, key.n, 2048, key.dtype)
        found = candidates.candidates(known)
        monkeypatch.setattr(candidates, "candidates", lambda key: found)
    params = STREAM_PARAMS | changed
    entry = {"choice": "it", "candidates": {"it": {"kernel": "stream", "params": params}}}
    path = tmp_path / "decode_gemm.json"
    path.write_text(json.dumps({"stack": STACK, "entries": {name: entry}}))
    table = read_table(path, STACK, candidates)
    if said:
        assert len(table.notes) == 1 and said in table.notes[0]
    else:
        assert table.notes == ()
        assert table.choose(key) == KernelChoice("stream", tuple(sorted(params.items())))
