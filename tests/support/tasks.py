"""Questions of the kinds that the built-in model was trained on, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

COUNTRIES = ("France", "Japan", "Italy", "Egypt", "Norway", "Peru", "Kenya", "Spain")
ELEMENTS = ("iron", "gold", "carbon", "helium", "sodium", "oxygen")
WORDS = ("lantern", "orbit", "velvet", "pepper", "granite", "meadow", "copper", "willow")
FUNCTIONS = ("factorial of n", "sum of a list", "largest number in a list", "reverse of a string")
Draw = random.Random


def _numbers(draw: Draw) -> str:
    return ", ".join(str(draw.randrange(100)) for _ in range(draw.randrange(4, 9)))


KINDS: tuple[Callable[[Draw], str], ...] = (
    lambda draw: f"What is {draw.randrange(1000)} + {draw.randrange(1000)}?",
    lambda draw: f"What is the capital of {draw.choice(COUNTRIES)}?",
    lambda draw: f"Sort these numbers: {_numbers(draw)}",
    lambda draw: f"Write a Python function that returns the {draw.choice(FUNCTIONS)}.",
    lambda draw: f"Write the word {draw.choice(WORDS)} backwards.",
    lambda draw: f"What is the chemical symbol of {draw.choice(ELEMENTS)}?",
    lambda draw: f"Count from {draw.randrange(1, 20)} to {draw.randrange(30, 50)}.",
    lambda draw: f"Write a short story about a {draw.choice(WORDS)}.",
    lambda draw: f"Give me JSON with name {draw.choice(WORDS)} and age {draw.randrange(20, 80)}.",
    lambda draw: f"Explain what a {draw.choice(WORDS)} is.",
)


def questions(count: int, seed: int = 0) -> list[str]:
    """`count` questions, the kinds in turn."""
    draw = random.Random(seed)
    return [KINDS[number % len(KINDS)](draw) for number in range(count)]


def chats(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """The questions as `messages`."""
    return [[{"role": "user", "content": question}] for question in questions(count, seed)]


def long_prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random ordinary token ids of the built-in model."""
    draw = random.Random(seed)
    return [draw.randrange(5900) for _ in range(tokens)]
