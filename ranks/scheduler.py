"""Which request runs next, and with which blocks: continuous batching, first come first served.

Pure logic on rank 0, without tensors and clocks. `plan()` makes a step's plan, `commit()` takes its results,
in the same order; between the two the step is in flight, and another may be planned. An aborted or finished
request keeps its slot and blocks until its last step in flight has come back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mstar.ranks.cache import BLOCK_SIZE, Pool, blocks_for
from mstar.ranks.messages import Refused, SamplingParams, Submit, TokenRun
from mstar.ranks.plan import DECODE_BUCKETS, Chunk, Drawn, StepPlan, TableUpdate, bucket_of
from mstar.ranks.request import Request
from mstar.ranks.speculation.policy import Policy
from mstar.ranks.speculation.route import LoadFacts, RequestFacts, Route, route
from mstar.ranks.speculation.stats import SpecStats

log = logging.getLogger(__name__)

# A chunk that is not a prompt's last ends at a multiple of this: the chunk length of the delta rule's
# prefill, so that chunked and whole prefill do the same arithmetic.
CHUNK_BORDER = 64
# Block-table columns of the decode part come in steps of this (128 tokens): few shapes, little for nothing.
COLUMN_STEP = 8

# A request's own acceptance is looked at every so many of its steps: enough to say something.
REVIEW_STEPS = 32

FINISH = (None, "stop", "length")  # by the sampler's code


class SlotSampler(Protocol):
    """What the scheduler tells the sampler, and asks it."""

    def admit(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None: ...

    def release(self, slot: int) -> None: ...

    def plain_greedy(self, slots: Sequence[int]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the load decided. Budgets are prompt tokens a step, multiples of CHUNK_BORDER."""

    max_seq: int
    max_num_seqs: int
    kv_blocks: int  # without the sink
    prefill_budget: int  # while nobody decodes
    mixed_budget: int  # beside running decodes: what a stream waits for between two of its tokens
    drafts: int = 0  # the most a step for a sequence; 0: no speculation
    buckets: tuple[int, ...] = DECODE_BUCKETS  # sizes of the decode part; none: any


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Flight:
    number: int
    rows: list[Request]  # those that draw
    checked: list[int | None]  # drafts of each, None for a final chunk
    touched: list[Request] = field(default_factory=list)  # each once


class Scheduler:
    """Owns the requests from Submit to their end, the block pool and the slot pool.

    first_number: of its first plan, where plans were made before (warm-up). policy: of the drafts in force.
    """

    def __init__(
        self, limits: Limits, sampler: SlotSampler, first_number: int = 1, policy: Policy | None = None
    ) -> None:
        self.limits = limits
        self.policy = policy or Policy(limits.drafts)
        self.spec = SpecStats(limits.drafts)
        self.blocks = Pool(limits.kv_blocks)
        self.slots = Pool(limits.max_num_seqs)
        self.counters = Counters()
        self.waiting: deque[Request] = deque()  # oldest first; preempted ones are older than all others
        self.running: list[Request] = []  # oldest first
        self.admitted: list[Request] = []  # started by the latest plan
        self.failed: list[Refused] = []  # ended by it: they cannot start
        self._by_id: dict[int, Request] = {}
        self._flights: deque[_Flight] = deque()
        self._sampler = sampler
        self._next_number = first_number
        self._tables: list[TableUpdate] = []  # for the next plan that is sent

    @property
    def idle(self) -> bool:
        """Nothing to plan and nothing in flight."""
        return not (self.waiting or self.running or self._flights)

    @property
    def steps_in_flight(self) -> int:
        return len(self._flights)

    @property
    def next_number(self) -> int:
        """Of the plan to come."""
        return self._next_number

    def submit(self, submit: Submit) -> Refused | None:
        """Queues a request, or says why it can never run."""
        prompt, limits = len(submit.prompt_ids), self.limits
        if prompt == 0:
            return Refused(submit.request_id, "validation", "the prompt is empty: send at least one token")
        if prompt >= limits.max_seq:
            message = (
                f"the prompt has {prompt} tokens and max_seq is {limits.max_seq}, which leaves no room for "
                "an answer: shorten the prompt or load with a larger max_seq"
            )
            return Refused(submit.request_id, "context_length", message)
        limit = min(prompt + max(1, submit.sampling.max_tokens), limits.max_seq)
        # The last token drawn is never fed, so it needs no KV.
        if blocks_for(limit - 1) > limits.kv_blocks:
            message = (
                f"prompt and max_tokens need KV for {limit - 1} tokens and the load holds "
                f"{limits.kv_blocks * BLOCK_SIZE}: shorten the prompt, lower max_tokens, or load with a "
                "larger memory_fraction"
            )
            return Refused(submit.request_id, "context_length", message)
        request = Request(submit.request_id, submit.prompt_ids, submit.sampling, limit)
        self._by_id[request.request_id] = request
        self.waiting.append(request)
        return None

    def abort(self, request_id: int) -> None:
        """Forgets a request in whatever phase; unknown ids are ignored. Nothing more of it is returned."""
        request = self._by_id.get(request_id)
        if request is None:
            return
        if request.slot == 0:
            self.waiting.remove(request)
        self._end(request)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing is to do or only results in flight can free what is needed."""
        self.admitted = []
        self.failed = []
        if not self._reserve_decodes():
            return None
        decodes = [request for request in self.running if self._decodes(request)]
        load = LoadFacts(self.limits.drafts, self.policy.plan(len(decodes)))
        chunks, prefilled = self._chunks(bool(decodes), load)
        if not decodes and not chunks:
            return None
        finals = [request for request, chunk in zip(prefilled, chunks, strict=True) if chunk.final]
        rows = finals + decodes
        # before `computed` moves: a decoding request's newest token is the one after it
        routes = [self._route(request, load) for request in rows] if load.k else []
        checked = [way.check for way in routes[len(finals) :]] or [0] * len(decodes)
        for request in decodes:
            request.computed += 1
        slots = [request.slot for request in decodes]
        counters = self.counters
        counters.steps += 1
        counters.prefill_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        columns = max((blocks_for(r.computed + d) for r, d in zip(decodes, checked, strict=True)), default=0)
        plan = StepPlan(
            number=self._next_number,
            tables=self._tables,
            chunks=chunks,
            chunk_columns=max((blocks_for(r.computed) for r in prefilled), default=0),
            decode_slots=slots,
            decode_bucket=bucket_of(len(slots), self.limits.buckets),
            decode_columns=min(-(-columns // COLUMN_STEP) * COLUMN_STEP, blocks_for(self.limits.max_seq)),
            gather_logits=bool(rows) and not self._sampler.plain_greedy([r.slot for r in rows]),
            decode_counts=[1 + drafts for drafts in checked] if any(checked) else [],
        )
        if any(way.follow for way in routes):
            plan.draft_most.extend(way.draft if way.follow else -1 for way in routes)
            plan.draft_ends.extend(map(self._draft_end, rows))
        self._next_number += 1
        self._tables = []
        flight = _Flight(plan.number, rows, [None] * len(finals) + checked, prefilled + decodes)
        for request in flight.touched:
            request.in_flight += 1
        self._flights.append(flight)
        return plan

    def commit(self, plan: StepPlan, drawn: Drawn) -> list[TokenRun]:
        """Takes the results of the oldest plan in flight; returns what its requests got."""
        flight = self._flights.popleft()
        if flight.number != plan.number:
            raise RuntimeError(f"results of step {plan.number} came before those of step {flight.number}")
        for request in flight.touched:
            request.in_flight -= 1
        runs: list[TokenRun] = []
        logprobs = drawn.logprobs
        for row, (request, checked) in enumerate(zip(flight.rows, flight.checked, strict=True)):
            if request.ended:
                continue
            ids = drawn.runs[row]
            accepted = drawn.accepted[row] if drawn.accepted else 0
            request.output_ids += ids
            request.drafts = drawn.drafts[row] if drawn.drafts else 0
            if checked is not None:
                request.computed += len(ids) - 1
                self.counters.decode_tokens += len(ids)
                if request.follow:
                    self._count(request, checked, accepted)
            finish = FINISH[drawn.finish[row]]
            if finish is None and request.tokens >= request.limit:
                finish = "length"
            entries = None if logprobs is None else logprobs[row]
            runs.append(TokenRun(request.request_id, ids, finish, entries, checked, accepted))
            if finish is not None:
                self._end(request)
        for request in flight.touched:
            if request.ended and request.slot and request.in_flight == 0:
                self._free(request)
        return runs

    def _decodes(self, request: Request) -> bool:
        """Whether the next step has rows of it. How many drafts a step accepts decides where the next one begins."""
        if not request.decoding or request.computed + 1 >= request.limit:
            return False
        return not (request.follow and request.in_flight)

    def _route(self, request: Request, load: LoadFacts) -> Route:
        length = request.computed + 1 if request.decoding else request.known
        facts = RequestFacts(
            request.sampling.spec_k, request.given_up, length, self._draft_end(request), request.drafts
        )
        return route(facts, load)

    def _draft_end(self, request: Request) -> int:
        """The length that drafts must not pass: the last token is nobody's draft, and each needs a row of KV."""
        return min(request.limit - 1, len(request.blocks) * BLOCK_SIZE)

    def _count(self, request: Request, checked: int, accepted: int) -> None:
        self.spec.count(checked, accepted)
        self.policy.count(checked, accepted)
        request.spec_steps += 1
        request.spec_drafted += checked
        request.spec_accepted += accepted
        if request.spec_steps == REVIEW_STEPS:
            if self.policy.gives_up(request.spec_steps, request.spec_drafted, request.spec_accepted):
                request.given_up = True
                request.follow = False
                request.drafts = 0
            request.spec_steps = request.spec_drafted = request.spec_accepted = 0

    def _reserve_decodes(self) -> bool:
        """Gives each decoding request the block of its next token, oldest first, preempting the youngest.

        False when a victim's step is still in flight: its results must come first.
        """
        for request in list(self.running):
            preempted = request.slot == 0
            if preempted or not self._decodes(request):
                continue
            missing = blocks_for(request.computed + 1) - len(request.blocks)
            while request.slot and missing > self.blocks.free:
                victim = self.running[-1]
                if victim.in_flight:
                    return False
                self._preempt(victim)
            if request.slot and missing > 0:
                self._grow(request, missing)
        if self.limits.drafts:
            # Room for drafts is taken from what is free: nobody is preempted for it.
            for request in self.running:
                if request.follow and self._decodes(request):
                    missing = blocks_for(self._reach(request, request.computed + 1)) - len(request.blocks)
                    if missing > 0 and self.blocks.free:
                        self._grow(request, min(missing, self.blocks.free))
        return True

    def _reach(self, request: Request, length: int) -> int:
        """Tokens that a speculating request's blocks should hold: a step's drafts, the next one's and the chain."""
        return min(length + 3 * self.limits.drafts + 1, max(length, request.limit - 1))

    def _chunks(self, mixed: bool, load: LoadFacts) -> tuple[list[Chunk], list[Request]]:
        """Prompt tokens for this step: requests in prefill first, then new ones while there is room."""
        budget = self.limits.mixed_budget if mixed else self.limits.prefill_budget
        chunks: list[Chunk] = []
        requests: list[Request] = []
        prefilling = deque(request for request in self.running if not request.decoding)
        while budget > 0:
            request = prefilling[0] if prefilling else self._admissible()
            if request is None:
                break
            start = request.computed
            left = (request.known if prefilling else request.tokens) - start
            size = left if left <= budget else (start + budget) // CHUNK_BORDER * CHUNK_BORDER - start
            if size <= 0:
                break
            if prefilling:
                prefilling.popleft()
            elif not self._admit(request, load):
                continue
            request.computed += size
            budget -= size
            token_ids = request.token_ids(start, start + size)
            next_id = 0 if request.decoding else request.token_ids(start + size, start + size + 1)[0]
            chunks.append(Chunk(request.slot, start, token_ids, request.decoding, request.follow, next_id))
            requests.append(request)
        return chunks, requests

    def _admissible(self) -> Request | None:
        """The oldest waiting request if it fits now, with a block to spare for each one that runs."""
        if not self.waiting or self.slots.free == 0:
            return None
        request = self.waiting[0]
        # Without the spare blocks, the growth of those that run would preempt it again at once.
        fits = blocks_for(self._wanted(request)) + len(self.running) <= self.blocks.free
        return request if fits else None

    def _wanted(self, request: Request) -> int:
        """Tokens that a waiting request's blocks should hold at its start."""
        return self._reach(request, request.tokens) if self.limits.drafts else request.tokens

    def _admit(self, request: Request, load: LoadFacts) -> bool:
        """Gives the oldest waiting request all that it needs to run; False where it failed, alone."""
        self.waiting.popleft()
        request.slot = self.slots.take()
        request.known = request.tokens
        if load.k and not request.started and request.sampling.spec_k != 0:
            left = request.limit - request.tokens
            request.given_up = not self.policy.starts(len(self.running) + 1, left)
        request.follow = self._route(request, load).follow
        self._grow(request, blocks_for(self._wanted(request)))
        self.running.append(request)
        try:
            self._sampler.admit(request.slot, request.sampling, request.prompt_ids, request.output_ids)
        except Exception as error:
            log.exception("request %d cannot be admitted", request.request_id)
            self._end(request)
            message = f"the request could not be admitted: {type(error).__name__}: {error}"
            self.failed.append(Refused(request.request_id, "internal", message))
            return False
        if not request.started:
            request.started = True
            self.admitted.append(request)
        return True

    def _grow(self, request: Request, count: int) -> None:
        taken = self.blocks.take_many(count)
        self._tables.append(TableUpdate(request.slot, len(request.blocks), taken))
        request.blocks += taken

    def _preempt(self, request: Request) -> None:
        """Takes all from a request without steps in flight; it runs prompt and output again, first of all."""
        self.counters.preemptions += 1
        self.running.remove(request)
        self._free(request)
        request.computed = request.known = request.drafts = 0
        self.waiting.appendleft(request)

    def _end(self, request: Request) -> None:
        """Drops a request from everything but the steps in flight that still name it."""
        request.ended = True
        del self._by_id[request.request_id]
        if request.slot:
            self.running.remove(request)
            if request.in_flight == 0:
                self._free(request)

    def _free(self, request: Request) -> None:
        self._sampler.release(request.slot)
        self.slots.give_back([request.slot])
        self.blocks.give_back(request.blocks)
        # Updates not sent yet would land in the slot's next owner's table.
        self._tables = [update for update in self._tables if update.slot != request.slot]
        request.slot = 0
        request.blocks = []
