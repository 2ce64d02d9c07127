"""Steps on a GPU: captured and eager give the same bytes, and nothing of the steady state waits or allocates."""

from __future__ import annotations

import json
import re

import pytest
import torch

from mstar.ranks.messages import SamplingParams
from mstar.scripts.offline_engine import OfflineEngine
from mstar.scripts.offline_model import OfflineModel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: device steps are not tested here"
)

# What may make the host wait; pinned copies and event queries do not.
WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$|cudaMalloc|cudaFree")


@pytest.fixture(scope="module")
def model() -> OfflineModel:
    return OfflineModel("builtin:tiny", "bf16", "cuda")


def run(engine: OfflineEngine, count: int, tokens: int, **sampling) -> dict[int, list[int]]:
    for index in range(count):
        prompt = [(7 * index + 3 * place) % 6000 for place in range(5 + 11 * index % 90)]
        engine.submit(index, prompt, SamplingParams(max_tokens=tokens, seed=index, **sampling))
    got: dict[int, list[int]] = {}
    while engine.step():
        for result in engine.runs:
            got.setdefault(result.request_id, []).extend(result.ids)
    return got


@pytest.mark.parametrize("count", [1, 3, 8, 13])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 30, "top_p": 0.9}]
)
def test_captured_steps_give_the_bytes_of_eager_ones(model, count, sampling):
    engines = [
        OfflineEngine(model, drafts=0, max_num_seqs=13, max_seq=400, eager=eager) for eager in (True, False)
    ]
    eager, captured = (run(engine, count, 40, **sampling) for engine in engines)
    assert captured == eager
    assert all(len(ids) == 40 for ids in captured.values())
    a, b = (engine.executor for engine in engines)
    for mine, theirs in zip(a.caches, b.caches, strict=True):
        for name in mine.__slots__:
            assert torch.equal(getattr(mine, name)[1:], getattr(theirs, name)[1:])
    for engine in engines:
        engine.end()


def test_filtered_draws_are_the_samplers(model):
    """Top-k and top-p in the step against the sampler's own, which needs the host: logprobs send a request there."""
    engine = OfflineEngine(model, drafts=0, max_num_seqs=4, max_seq=400)
    filters = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    in_step = run(engine, 4, 40, **filters)
    by_sampler = run(engine, 4, 40, logprobs=0, **filters)
    assert in_step == by_sampler
    engine.end()


def steady(model: OfflineModel, count: int, drafts: int = 0) -> OfflineEngine:
    engine = OfflineEngine(model, drafts=drafts, max_num_seqs=8, max_seq=600)
    for index in range(count):
        engine.submit(
            index, [index + 1] * 20, SamplingParams(max_tokens=500, seed=index, temperature=0.5 * (index % 2))
        )
    for _ in range(10):
        engine.step()
    return engine


def test_steady_steps_make_nobody_wait(model, tmp_path):
    engine = steady(model, 5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile() as profile:
        for _ in range(20):
            engine.step()
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    waits = [name for name in names if WAITS.search(name)]
    # the host reads a step's tokens behind their event, one wait a step, and the profiler's own end
    others = [name for name in waits if name not in ("cudaEventSynchronize", "cudaDeviceSynchronize")]
    assert not others
    assert waits.count("cudaEventSynchronize") <= 20 and waits.count("cudaDeviceSynchronize") <= 2
    engine.end()


def test_prompts_and_admissions_make_nobody_wait(model):
    engine = steady(model, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(3):
            params = SamplingParams(max_tokens=30, seed=index, temperature=0.7, eos_ids=(6137,))
            engine.submit(100 + index, [5 + index] * (40 + 70 * index), params)
            for _ in range(4):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.end()


def test_steady_steps_allocate_nothing(model):
    engine = steady(model, 5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(100):
        engine.step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["num_device_alloc"] == before["num_device_alloc"]
    engine.end()


def test_the_kernels_of_a_captured_bucket(model):
    """A fusion that breaks shows as another kernel in the step."""
    engine = steady(model, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    kernels = {name: count / 4 for name, count in counts.items() if name.startswith("_")}  # ours: the graph's
    layers = model.config.layer_types
    full, linear = layers.count("full_attention"), layers.count("linear_attention")
    print(kernels)
    assert sum(count for name, count in kernels.items() if "gdn_decode" in name) == linear
    assert sum(count for name, count in kernels.items() if "qkv" in name) == full
    # in_proj, out_proj, gate|up and down of each layer, and the lm_head
    products = sum(count for name, count in kernels.items() if re.search("fma|dot|mma", name))
    assert products == 4 * len(layers) + 1
    assert sum(kernels.values()) <= 5 * linear + 7 * full + 5
    engine.end()
