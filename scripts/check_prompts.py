"""The checks' prompts in tokens of any model: tasks of the built-in model's kinds, and long texts made of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from mstar.daemon.text import load_text
from mstar.scripts.tasks import chats, render, sample

# Retrieval tasks list up to 160 codes; as short prompts they are cut off here.
SHORT_TOKENS = 600
LONG = "long"  # the kind of long prompts


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    kind: str
    ids: list[int]


def short_prompts(model_dir: Path, count: int, seed: int) -> list[CheckPrompt]:
    """Conversations up to the last question, through the model's template."""
    text = load_text(model_dir)
    drawn = (
        CheckPrompt(chat.kind, text.render(chat.messages))
        for number in itertools.count()
        for chat in chats(64, seed * 1000 + number)
    )
    return list(itertools.islice((p for p in drawn if len(p.ids) <= SHORT_TOKENS), count))


def long_prompts(model_dir: Path, count: int, tokens: int, seed: int) -> list[CheckPrompt]:
    """Chats one after another, cut at the front to exactly `tokens`, up to a last question."""
    text = load_text(model_dir)
    draw = random.Random(f"long {seed}")
    found = []
    for _ in range(count):
        last = text.render(sample(draw).messages)
        before: list[int] = []
        while len(before) + len(last) < tokens:
            before += text.encode(render(sample(draw).turns))
        found.append(CheckPrompt(LONG, (before + last)[-tokens:]))
    return found
