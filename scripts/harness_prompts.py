"""The harness's prompts: five that suit the built-in model and a real one, or those of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_TOKENS = 1024
_FIELDS = ("name", "messages", "expected_substrings", "max_tokens")


class PromptsError(ValueError):
    """A prompts file that cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A turn of the harness. expected_substrings: what the visible answer must contain, case aside."""

    name: str
    messages: list[dict[str, Any]]
    expected_substrings: list[str] = field(default_factory=list)
    max_tokens: int = MAX_TOKENS


def _ask(name: str, text: str, *expected: str) -> Prompt:
    return Prompt(name, [{"role": "user", "content": text}], list(expected))


# Of the kinds that the built-in model was taught (`mstar.scripts.tasks`), with answers of 40 tokens and more.
BUILT_IN = (
    _ask("code", "Write a Python function that merges two sorted lists.", "def ", "return"),
    _ask(
        "reasoning",
        "A train travels at 60 mph for 2 hours and then at 40 mph for 3 hours. How far does it go?",
        "240",
    ),
    _ask("factual", "In a few sentences, explain why Earth has seasons.", "tilt", "sun"),
    _ask("prose", "Write a short story about a brass key.", "brass key"),
    _ask("instructions", "Give 5 tips for writing clean code.", "1.", "5."),
)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON file: a list of `{"messages": [...], "expected_substrings": [...], "max_tokens": n}`.

    Only `messages` is required; `name` is optional, too. Raises PromptsError.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptsError(f"{path}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise PromptsError(f"{path}: a list of prompts is expected, with one prompt at least")
    return [_prompt(entry, f"{path}: [{index}]", index) for index, entry in enumerate(entries)]


def _prompt(entry: Any, where: str, index: int) -> Prompt:
    if not isinstance(entry, dict):
        raise PromptsError(f"{where}: a prompt is an object with `messages`")
    for name in entry:
        if name not in _FIELDS:
            raise PromptsError(f"{where}: unknown field {name!r}; there are {', '.join(_FIELDS)}")
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise PromptsError(f"{where}.messages: a list of messages is expected")
    expected = entry.get("expected_substrings", [])
    if not isinstance(expected, list) or not all(isinstance(part, str) and part for part in expected):
        raise PromptsError(f"{where}.expected_substrings: a list of texts is expected")
    max_tokens = entry.get("max_tokens", MAX_TOKENS)
    if type(max_tokens) is not int or max_tokens < 1:
        raise PromptsError(f"{where}.max_tokens: a positive integer is expected")
    name = entry.get("name", f"prompt {index + 1}")
    if not isinstance(name, str):
        raise PromptsError(f"{where}.name: a text is expected")
    return Prompt(name, messages, expected, max_tokens)
