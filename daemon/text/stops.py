"""Stop strings in a stream of text: found wherever they start, held back while they may appear."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_STOP_CHARS = 4096  # of one string: the automaton takes a node a character


class StopMatcher:
    """Aho-Corasick over a request's stop strings: constant time a character, however many strings there are.

    The state is the longest end of the text so far that begins some stop string, so its depth is
    exactly how much text must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings of at most MAX_STOP_CHARS; anything else is a ValueError."""
        if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state, 0 for none
        for stop in stops:
            self._add(stop)
        self._fail = self._link()
        self._firsts = frozenset(self._next[0])
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next text; returns what may be shown, and whether a stop string was completed.

        The first one to be completed wins, the longest where two end together; the text is cut before it.
        """
        state = self._state
        if not state and self._firsts.isdisjoint(text):
            return text, False
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            while (found := self._next[state].get(char)) is None and state:
                state = self._fail[state]
            state = found or 0
            if self._match[state]:
                self._state, self._held = 0, ""
                return buffer[: end - self._match[state]], True
        self._state = state
        shown = len(buffer) - self._depth[state]
        self._held = buffer[shown:]
        return buffer[:shown], False

    def flush(self) -> str:
        """Gives up what is held back, because no more of this text will come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][char]
        self._match[state] = len(stop)

    def _link(self) -> list[int]:
        """Failure links, breadth first: the longest proper end of a state that is itself a state."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if not self._match[state]:
                self._match[state] = self._match[fail[state]]
            for char, child in self._next[state].items():
                back = fail[state]
                while char not in self._next[back] and back:
                    back = fail[back]
                fail[child] = self._next[back].get(char, 0)
                queue.append(child)
        return fail
