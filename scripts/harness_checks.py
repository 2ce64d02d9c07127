"""What is wrong with an answer: loops, emptiness, things that it should have said."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

MIN_WORDS = 24  # shorter texts cannot loop
WINDOW = 128  # words looked at from either end
FIRST_UNIQUE = 0.15
LAST_UNIQUE = 0.30
MOST_ONE_WORD = 0.5
MOST_REPEATED = 0.5


def is_attractor(text: str) -> bool:
    """Whether a text has fallen into a loop, judged by its whitespace words.

    Its first 128 words: fewer than 15 % are different ones, or one word is more than half of them. Its last 128:
    fewer than 30 %, or one is more than half. Its second half: more than half of the 3-grams stood there before.
    """
    words = text.split()
    if len(words) < MIN_WORDS:
        return False
    return (
        _monotonous(words[:WINDOW], FIRST_UNIQUE)
        or _monotonous(words[-WINDOW:], LAST_UNIQUE)
        or repeated_share(words[len(words) // 2 :]) > MOST_REPEATED
    )


def _monotonous(words: Sequence[str], least_unique: float) -> bool:
    counts = Counter(words)
    most_common = counts.most_common(1)[0][1]
    return len(counts) / len(words) < least_unique or most_common / len(words) > MOST_ONE_WORD


def repeated_share(words: Sequence[str]) -> float:
    """The share of 3-grams that are not their first occurrence."""
    grams = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def missing_substrings(text: str, expected: Sequence[str]) -> list[str]:
    """Those of `expected` that the text lacks, case aside."""
    lowered = text.lower()
    return [part for part in expected if part.lower() not in lowered]


def md5_of(value: Any) -> str:
    """Of a text, or of anything else as canonical JSON."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()
