"""One request's ids to what its client sees: visible text and reasoning, cut at stop strings, with counts.

What is decided here:
- `<think>` and `</think>` count by id, as the engine counts them; they switch streams and are never text.
  A marker's id travels in the reasoning stream (a `</think>` without a span: in the visible one).
- Text is exact: the "\\n" after `<think>` and the "\\n\\n" after `</think>` are there, nothing is stripped.
- Special tokens (EOS, turn marks) and the stop id that ended the request have no text, but are counted.
- Stop strings are searched in the visible text alone, since a "\\n\\n" would otherwise end every answer
  in the middle of its thinking, and not across a thinking span. Text that may become one is held back.
- A stop string ends the request with the token that completed it: that token and those before are counted
  and carry ids and logprobs, the text is cut before the string, later tokens are dropped.
- `reasoning_tokens` counts what stands between the markers; `completion_tokens` counts everything.

Tokens are taken one at a time, so how they were chunked changes nothing but where pieces are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from .detokenizer import Detokenizer
from .stops import StopMatcher

TOKEN = "token"
REASONING = "reasoning"


@dataclass(slots=True)
class Piece:
    """A stretch of one stream. ids and logprobs are None unless the request asked for them; a token whose
    text is held back is in the piece that was current when it came, so ids never wait for text."""

    kind: str  # "token" or "reasoning", the event's type
    text: str
    ids: list[int] | None = None
    logprobs: list[Any] | None = None  # one entry an id, as the engine gave it


@dataclass(slots=True)
class EmitterOutput:
    """What one push gave, and the counts so far."""

    pieces: list[Piece]
    stopped: bool  # a stop string was completed: finish with `stop`, and let the engine drop the rest
    completion_tokens: int
    reasoning_tokens: int
    open_think: bool  # inside a thinking span now


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids that mean something to the emitter."""

    special_ids: frozenset[int] = field(default_factory=frozenset)
    think_start_id: int | None = None
    think_end_id: int | None = None
    marks: frozenset[int] = field(init=False)  # all of them

    def __post_init__(self) -> None:
        ends = {id for id in (self.think_start_id, self.think_end_id) if id is not None}
        object.__setattr__(self, "marks", self.special_ids | ends)


class Emitter:
    """Made by `TextModel.emitter`, one for each request."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        in_think: bool = False,
        return_ids: bool = False,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """
        stop: stop strings, none of them empty.
        in_think: whether the prompt ends inside a thinking span.
        stop_ids: ids that end the request in the engine; hidden like special tokens.
        min_tokens: stop strings are looked for in the text of the tokens after these.
        """
        self._detokenizer = detokenizer
        self._start_id = vocabulary.think_start_id
        self._end_id = vocabulary.think_end_id
        self._hidden = vocabulary.special_ids | frozenset(stop_ids)
        self._stops = StopMatcher(stop) if stop else None
        self._marks = vocabulary.marks | frozenset(stop_ids)  # ids that are more than text
        self._thinking = in_think
        self._return_ids = return_ids
        self._min_tokens = min_tokens
        self._over = False
        self.stopped = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    @property
    def open_think(self) -> bool:
        return self._thinking

    def push(
        self, ids: Sequence[int], logprobs: Sequence[Any] | None = None, final: bool = False
    ) -> EmitterOutput:
        """Takes the next tokens; `final` with the last of them (or with none) gives up what is held back.

        logprobs: one entry an id, where the request asked for them.
        Once a stop string was found or `final` was said, further pushes give nothing.
        """
        pieces: list[Piece] = []
        if len(ids) == 1 and not final and logprobs is None and self._stops is None and not self._over:
            # nearly all that ever comes, and all that a busy daemon does: as below, without the calls
            token_id = ids[0]
            if token_id not in self._marks:
                self.completion_tokens += 1
                self.reasoning_tokens += self._thinking
                text = self._detokenizer.push(token_id)
                if text or self._return_ids:
                    kind = REASONING if self._thinking else TOKEN
                    pieces.append(Piece(kind, text, [token_id] if self._return_ids else None))
                return EmitterOutput(
                    pieces, False, self.completion_tokens, self.reasoning_tokens, self._thinking
                )
        if not self._over:
            for index, token_id in enumerate(ids):
                self._take(token_id, logprobs[index] if logprobs is not None else None, pieces)
                if self.stopped:
                    break
            if final and not self.stopped:
                self._end_visible(pieces)
            self._over = final or self.stopped
        return EmitterOutput(
            pieces, self.stopped, self.completion_tokens, self.reasoning_tokens, self._thinking
        )

    def _take(self, token_id: int, logprob: Any, pieces: list[Piece]) -> None:
        self.completion_tokens += 1
        thinking, text = self._thinking, ""
        if token_id == self._end_id or token_id == self._start_id:
            opens = token_id == self._start_id
            if opens and not thinking:
                self._end_visible(pieces)
            if opens != thinking:
                self._detokenizer.reset()
            thinking = thinking or opens  # the stream that the marker's id travels in
            self._thinking = opens
        else:
            if token_id not in self._hidden:
                text = self._detokenizer.push(token_id)
            if thinking:
                self.reasoning_tokens += 1
            elif text and self._stops is not None and self.completion_tokens > self._min_tokens:
                text, self.stopped = self._stops.feed(text)
        self._add(pieces, REASONING if thinking else TOKEN, text, token_id, logprob)

    def _end_visible(self, pieces: list[Piece]) -> None:
        """The visible text ends here, for now or for good: what was held back is no stop string."""
        if self._stops is not None and (text := self._stops.flush()):
            self._join(pieces, TOKEN).text += text

    def _add(self, pieces: list[Piece], kind: str, text: str, token_id: int, logprob: Any) -> None:
        if not text and not self._return_ids and logprob is None:
            return
        piece = self._join(pieces, kind)
        if text:
            piece.text += text
        if self._return_ids and piece.ids is not None:
            piece.ids.append(token_id)
        if logprob is not None:
            piece.logprobs = piece.logprobs or []
            piece.logprobs.append(logprob)

    def _join(self, pieces: list[Piece], kind: str) -> Piece:
        """The last piece if it is of this stream, else a new one."""
        if not pieces or pieces[-1].kind != kind:
            pieces.append(Piece(kind, "", [] if self._return_ids else None))
        return pieces[-1]
