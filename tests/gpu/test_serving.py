"""The daemon on a GPU gives the CPU's text; skipped, by this name, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from mstar.daemon.client import Client
from tests.support.live_daemon import live_daemon

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: serving on one is not tested here"
)

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that merges two sorted lists.",
    "Sort these numbers: 41, 7, 93, 12, 58.",
    "Explain how rainbows form.",
    "What is 57 + 68?",
]


def answers(dtype: str, *flags: str) -> list[list[int]]:
    """The completion ids of every prompt, greedy; a later --device wins."""
    texts = []
    with live_daemon(*flags) as live, Client(live.zmq_face.address, timeout_s=300) as client:
        client.load("builtin:tiny", dtype=dtype)
        for prompt in PROMPTS:
            ids: list[int] = []
            messages = [{"role": "user", "content": prompt}]
            for event in client.generate(messages=messages, max_tokens=200, return_ids=True):
                ids += getattr(event, "ids", None) or []
            texts.append(ids)
    return texts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", range(1, 1 + max(1, min(2, torch.cuda.device_count()))))
def test_text_on_a_gpu_is_that_of_the_cpu_in_float32(tp):
    there = answers("fp32", "--device", "cuda", "--tp", str(tp))
    assert there == answers("fp32", "--device", "cpu")
    assert all(len(ids) > 3 for ids in there)


@pytest.mark.timeout(600)
def test_the_same_request_twice_in_bf16_on_a_gpu_gives_the_same_ids():
    first = answers("bf16", "--device", "cuda")
    assert first == answers("bf16", "--device", "cuda")
