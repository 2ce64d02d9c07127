"""One request as the scheduler sees it: tokens, resources, and how far the planned steps have got."""

from __future__ import annotations

from dataclasses import dataclass, field

from mstar.ranks.messages import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """`computed` counts planned work, `output_ids` only what has come back: a step in flight lies between."""

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    limit: int  # length of prompt and output at which the request ends, whatever it draws
    output_ids: list[int] = field(default_factory=list)
    started: bool = False  # Started has been sent; a preempted request does not start twice
    ended: bool = False  # finished or aborted: what is still in flight is dropped
    in_flight: int = 0  # steps planned with this request whose results have not come back
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV and state the planned steps leave in the caches
    known: int = 0  # tokens to prefill: prompt, and the output so far when it was preempted
    follow: bool = False  # the head runs over its rows; decided at its start, and taken back for good
    given_up: bool = False  # plain decode is faster for it
    drafts: int = 0  # that its last step made and its next one may check
    spec_steps: int = 0  # since the policy looked at it: steps, drafts checked and accepted
    spec_drafted: int = 0
    spec_accepted: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def decoding(self) -> bool:
        """Its final chunk has been planned: by phase, never by how many tokens are left."""
        return self.computed >= self.known

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens `start` ... `end - 1` of prompt and output."""
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[max(0, start - prompt) : end - prompt]
