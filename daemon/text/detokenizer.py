"""Ids to text, one id at a time, in constant time an id. Incomplete UTF-8 is held back, never replaced.

Bytes that can no longer become a character (a lead byte followed by something else) do come out as
U+FFFD, as they do from `tokenizer.decode`. Bytes still waiting for their rest when a stream ends are
dropped, as vLLM drops them; their ids stay counted.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# An id's worth of a byte-fallback vocabulary is one byte, and a character has at most four; past this
# many undecidable ids the text is invalid for good and is shown as the tokenizer shows it.
MAX_PENDING_IDS = 8


class Detokenizer(Protocol):
    """Turns one request's ids into text."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this id, maybe empty."""

    def reset(self) -> None:
        """Forgets what is held back: the next id begins a stream of its own."""


def byte_alphabet() -> dict[str, int]:
    """Character to byte of the byte-level BPE alphabet (GPT-2): printable Latin-1 stands for itself, and
    the other bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class ByteVocabulary:
    """The bytes of every id of a byte-level BPE vocabulary, found when first asked for.

    token_of: an id's vocabulary entry, or None for an id outside it.
    """

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}  # of ids that are whole characters, once `bytes_of` has seen them

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of an id; empty for ids that the vocabulary lacks (models pad theirs)."""
        found = self._bytes.get(token_id)
        if found is not None:
            return found
        token = self._token_of(token_id) or ""
        try:
            data = bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token, which is plain text
            data = token.encode("utf-8", "replace")
        self._bytes[token_id] = data
        text, used = codecs.utf_8_decode(data, "replace", False)
        # A continuation byte at the start may belong to the id before, so such ids have no text of their own.
        if used == len(data) and "\ufffd" not in text:
            self.texts[token_id] = text
        return data


class ByteDetokenizer:
    """For byte-level BPE: concatenates bytes and shows what has become whole characters."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._pending = b""

    def push(self, token_id: int) -> str:
        if not self._pending:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = self._pending + self._vocabulary.bytes_of(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def reset(self) -> None:
        self._pending = b""


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window of ids, and shows by how much its text grew.

    The window starts at the ids shown last, since decoders look one id back (a leading space, say).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        self._shown_text = ""  # of `_shown` alone
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode([*self._shown, *self._pending])
        if text.endswith("\ufffd") and len(self._pending) < MAX_PENDING_IDS:
            return ""
        new = text[len(self._shown_text) :]
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)
        return new

    def reset(self) -> None:
        self._shown, self._shown_text, self._pending = [], "", []
