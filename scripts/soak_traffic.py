"""What the clients of a soak ask for: drawn requests, how each is meant to end, and a ledger that says how it did."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

# When its client aborts a request: with the same breath, after its start (long prompts are in prefill
# then), after a few tokens, or after a random while, wherever that is.
AbortAt = Literal["at once", "started", "streaming", "later"]
ABORTS: tuple[AbortAt, ...] = ("at once", "started", "streaming", "later")

ABORTED_SHARE = 1 / 3
DEADLINE_SHARE = 0.04
MOST_PROBLEMS = 200
WORDS = (
    "river",
    "stone",
    "light",
    "seven",
    "under",
    "green",
    "house",
    "walk",
    "count",
    "list",
    "metal",
    "north",
)
QUESTIONS = (
    "What is the capital of France?",
    "What is 37 + 58?",
    "Sort these numbers: 9, 2, 31, 14, 5",
    "Write a Python function that returns the factorial of n.",
    "Write a short story about a fox.",
    "What is the chemical symbol of iron?",
)

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of the drawn requests, in tokens."""

    shortest: int = 5
    longest: int = 3000
    most_output: int = 200
    vocab: int = 6144
    max_seq: int = 4096


@dataclass(slots=True)
class Ask:
    """One request: the message, when it is aborted, and what has come back for it."""

    message: dict[str, Any]
    abort_at: AbortAt | None = None
    abort_after: float = 0.0  # events for `streaming`, seconds for `later`
    deadline: bool = False
    unread: bool = False  # of a client that does not read: may end as `overloaded`
    sent_at: float = 0.0
    started: bool = False
    aborted: bool = False
    orphaned: bool = False  # its connection was cut: nobody is there for its end
    events: int = 0
    ids: int = 0
    ends: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return (self.message["id"], self.message["attempt_id"])

    @property
    def open(self) -> bool:
        return not self.ends and not self.orphaned


class Draw:
    """Draws requests; the same seed gives the same ones."""

    def __init__(self, seed: str, shape: Shape) -> None:
        self.random = random.Random(seed)
        self._shape = shape
        self._prefix = f"soak-{seed}-".replace(" ", "-")
        self._count = 0

    def ask(self) -> Ask:
        """A request of any kind that the protocol knows."""
        draw, shape = self.random, self._shape
        self._count += 1
        message: dict[str, Any] = {
            "type": "generate",
            "id": f"{self._prefix}{self._count}",
            "attempt_id": draw.choice((0, 0, 1, 7)),
            "max_tokens": self.log_uniform(1, shape.most_output),
            **self._prompt(),
            **self._sampling(),
            **self._extras(),
        }
        if "messages" in message and draw.random() < 0.5:
            message |= {"thinking": True}
            if draw.random() < 0.7:
                message |= {"max_think_tokens": draw.randrange(0, 40)}
        ask = Ask(message)
        if draw.random() < ABORTED_SHARE:
            ask.abort_at = draw.choice(ABORTS)
            ask.abort_after = draw.random() * 3 if ask.abort_at == "later" else draw.randrange(1, 20)
        elif draw.random() < DEADLINE_SHARE:
            ask.deadline = True
            message["deadline_ms"] = self.log_uniform(1, 3000)
        return ask

    def unread(self, max_tokens: int) -> Ask:
        """A request of many large events, for a client that does not read them."""
        self._count += 1
        message = {
            "type": "generate",
            "id": f"{self._prefix}{self._count}",
            "attempt_id": 0,
            "prompt_ids": [5, 6, 7],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_ids": True,
            "logprobs": 20,
        }
        return Ask(message, unread=True)

    def log_uniform(self, low: int, high: int) -> int:
        """An integer whose logarithm is even: short ones as often as long ones."""
        return min(high, int(low * (high / low) ** self.random.random() * 1.0001))

    def _prompt(self) -> dict[str, Any]:
        draw, shape = self.random, self._shape
        size = self.log_uniform(shape.shortest, shape.longest)
        kind = draw.random()
        if kind < 0.4:
            top = int(shape.vocab * 0.97)  # special ids are at the end
            return {"prompt_ids": [draw.randrange(top) for _ in range(size)]}
        if kind < 0.6:  # a word and its space are a token or two
            words = " ".join(draw.choice(WORDS) for _ in range(max(1, size // 2)))
            return {"prompt": words}
        turns: list[dict[str, Any]] = [{"role": "user", "content": draw.choice(QUESTIONS)}]
        if draw.random() < 0.3:
            part = {"type": "text", "text": " ".join(draw.choice(WORDS) for _ in range(size // 3))}
            turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Yes."}, *turns]
        return {"messages": turns}

    def _sampling(self) -> dict[str, Any]:
        draw = self.random
        if draw.random() < 0.5:
            return {}
        fields: dict[str, Any] = {"temperature": draw.choice((0.3, 0.8, 1.0, 1.5))}
        for name, value in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.05), ("seed", draw.randrange(2**40))):
            if draw.random() < 0.4:
                fields[name] = value
        return fields

    def _extras(self) -> dict[str, Any]:
        draw = self.random
        choices: tuple[tuple[float, dict[str, Any]], ...] = (
            (0.15, {"stop": draw.sample(("the", "\n\n", " is", "e", "END"), draw.randrange(1, 4))}),
            (0.10, {"logprobs": draw.choice((0, 1, 20))}),
            (0.10, {"repetition_penalty": 1.2, "presence_penalty": 0.5}),
            (0.05, {"frequency_penalty": 0.3}),
            (0.30, {"return_ids": True}),
            (0.20, {"ignore_eos": True}),
            (0.05, {"stop_token_ids": [draw.randrange(100)]}),
            (0.05, {"min_tokens": 1}),
        )
        fields: dict[str, Any] = {}
        for share, extra in choices:
            if draw.random() < share:
                fields |= extra
        return fields


class Ledger:
    """Every request of the soak, and every broken promise."""

    def __init__(self) -> None:
        self.asks: dict[Key, Ask] = {}
        self.problems: list[str] = []
        self.broken = 0

    def problem(self, text: str) -> None:
        self.broken += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)

    def open(self, ask: Ask, now: float) -> None:
        ask.sent_at = now
        self.asks[ask.key] = ask

    def take(self, event: dict[str, Any]) -> Ask | None:
        """Books an event of a living connection; returns its request, None where it is of none."""
        ask = self.asks.get((event.get("id", ""), event.get("attempt_id", -1)))
        kind = event["type"]
        if ask is None:
            if kind not in ("pong", "status", "stats"):
                self.problem(f"an event of no request: {event!r:.300}")
            return None
        if ask.ends:
            self.problem(f"{ask.key}: {kind} came after its end ({ask.ends[0]}): {event!r:.300}")
        if kind == "gen_start":
            if ask.started:
                self.problem(f"{ask.key} started twice")
            ask.started = True
        elif kind in ("token", "reasoning"):
            ask.events += 1
            ask.ids += len(event.get("ids") or ())
            if not ask.started:
                self.problem(f"{ask.key}: a {kind} came before gen_start")
        elif kind == "done":
            ask.ends.append(event["finish_reason"])
            self._check_done(ask, event)
        elif kind == "error":
            ask.ends.append(f"error.{event['class']}")
            expected = ask.deadline if event["class"] == "deadline" else ask.unread
            if not expected:
                self.problem(f"{ask.key} ended with {event['class']}: {event['message']:.300}")
        else:
            self.problem(f"{ask.key}: {kind} is no event of a generation")
        return ask

    def orphan(self, asks: list[Ask]) -> None:
        for ask in asks:
            if not ask.ends:
                ask.orphaned = True

    def unended(self) -> list[Ask]:
        return [ask for ask in self.asks.values() if ask.open]

    def counts(self) -> dict[str, int]:
        """How the requests ended, `cut off` for those that nobody was there for."""
        ends = Counter(ask.ends[0] if ask.ends else "cut off" for ask in self.asks.values())
        return dict(sorted(ends.items()))

    def fates(self) -> dict[str, int]:
        """What was meant to happen to them."""
        fates = Counter(
            "left alone" if a.abort_at is None else f"aborted {a.abort_at}" for a in self.asks.values()
        )
        fates["with a deadline"] = sum(a.deadline for a in self.asks.values())
        fates["of clients that do not read"] = sum(a.unread for a in self.asks.values())
        return dict(sorted(fates.items()))

    def _check_done(self, ask: Ask, event: dict[str, Any]) -> None:
        usage, message = event["usage"], ask.message
        reason, completion = event["finish_reason"], usage["completion_tokens"]
        if completion > message["max_tokens"]:
            self.problem(f"{ask.key}: {completion} tokens, {message['max_tokens']} asked for")
        if reason == "abort" and not ask.aborted:
            self.problem(f"{ask.key} ended as aborted, and nobody aborted it")
        if reason == "length" and completion < message["max_tokens"]:
            self.problem(f"{ask.key}: length after {completion} of {message['max_tokens']} tokens")
        if message.get("return_ids") and not message.get("stop") and ask.ids > completion:
            self.problem(f"{ask.key}: {ask.ids} ids came, {completion} tokens are counted")
        if usage["reasoning_tokens"] > completion:
            self.problem(f"{ask.key}: more reasoning tokens than tokens")
