"""Once a load is warm, no request has to wait for a kernel to be compiled, whatever arrives together."""

from __future__ import annotations

import random

import pytest
import torch

from mstar.ranks.messages import SamplingParams
from mstar.ranks.warmup import GPU_ROUNDS, TOKENS
from mstar.scripts.make_checkpoint import make_config, write_virtual
from mstar.scripts.offline_engine import OfflineEngine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: nothing is compiled for one, nor missed"
)
SEQUENCES, MAX_SEQ = 64, 2048


def run(engine, first, count, tokens, **params):
    """Submits so many prompts, and runs until all have ended; a few more arrive while they do."""
    for index in range(count):
        prompt = [(7 * index + place) % 1000 for place in range(tokens)]
        engine.submit(first + index, prompt, SamplingParams(max_tokens=TOKENS + index % 3, seed=0, **params))
    steps = 0
    while engine.step():
        steps += 1
        if steps == 2:
            for index in range(min(count, 5)):
                engine.submit(
                    first + 500 + index, [5] * (3 * index + 1), SamplingParams(max_tokens=2, seed=0)
                )


def test_nothing_is_compiled_after_the_warm_up(tmp_path):
    from triton import knobs

    from mstar.scripts.offline_model import OfflineModel

    # the vocabulary is what decides how draws are cut: the published one
    write_virtual(tmp_path, make_config("0.8B", layers=4), 0)
    engine = OfflineEngine(
        OfflineModel(str(tmp_path), "auto", "cuda"),
        drafts=0,
        max_num_seqs=SEQUENCES,
        max_seq=MAX_SEQ,
        budgets=(4096, 1024),
    )
    for number, (count, tokens) in enumerate(GPU_ROUNDS):
        run(engine, 1000 * number, count, tokens)
        run(engine, 1000 * number, count, tokens, temperature=1.0)
    compiled = []
    knobs.runtime.jit_cache_hook = lambda **what: compiled.append(what["repr"].split("[")[0])
    try:
        randomly = random.Random(4)
        for number in range(40):
            count = randomly.choice([1, 2, 3, 5, 7, 9, 12, 13, 15, 20, 33, 64])
            tokens = randomly.choice([1, 2, 30, 64, 65, 200, 700, 1500])
            filters = randomly.choice(
                [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}]
            )
            run(engine, 100_000 + 1000 * number, count, tokens, **filters)
            assert not compiled, f"{count} prompts of {tokens} tokens, {filters}"
    finally:
        knobs.runtime.jit_cache_hook = None
    engine.end()
