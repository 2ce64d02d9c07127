"""How many positions a ring of conv inputs or gates holds, where operations keep rings."""

from __future__ import annotations


def ring_rows(drafts: int, width: int = 4) -> int:
    """Rows of the rings of a load that checks up to `drafts` drafts a step, over a conv of `width` taps.

    A step reads width - 1 positions before its pending ones (up to `drafts`) and writes up to 1 + drafts more. A
    power of two, so that a position's place is a mask.
    """
    return int(1 << (2 * drafts + width - 1).bit_length())
