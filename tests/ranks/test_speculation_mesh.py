"""Speculation over ranks as processes: the tokens of one rank, from one broadcast a step."""

from __future__ import annotations

import pytest

from mstar.ranks import messages as m
from mstar.ranks.collectives import SoloCollective
from mstar.ranks.executor import Executor
from mstar.ranks.leader import Leader
from mstar.ranks.plan import StepPlan
from mstar.ranks.speculation.backend import Capacity, MeshBackend, SlotBackend, TrunkBackend
from tests.ranks.mesh import Mesh
from tests.support.engines import tiny
from tests.support.tasks import questions

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 42, "repetition_penalty": 1.1, "logprobs": 1}


def serve(mesh: Mesh) -> tuple[dict[int, list[int]], list[m.TokenRun]]:
    """One request alone, then greedy, sampled and plain ones at once; the ids of each and all runs."""
    mesh.submit(9, tiny().chat("Count from 3 to 40."), max_tokens=40)
    alone = mesh.finish({9})
    for request_id, question in enumerate(questions(6), 1):
        fields = SAMPLED if request_id % 3 == 0 else {}
        fields = fields | ({"spec_k": 0} if request_id == 5 else {})
        mesh.submit(request_id, tiny().chat(question), max_tokens=30, **fields)
    tokens = alone | mesh.finish(set(range(1, 7)))
    stats = mesh.stats()
    assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
    if mesh.spec.spec_k:
        assert sum(stats.spec_accepted) > 0
    return tokens, [run for event in mesh.events if isinstance(event, m.Tokens) for run in event.runs]


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    with Mesh(1) as mesh:
        mesh.wait_for(m.Ready)
        tokens, _ = serve(mesh)
        assert mesh.stop() == [0]
    return tokens


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_ranks_that_speculate_give_the_tokens_of_plain_decode_on_one(
    plain: dict[int, list[int]], tp: int
) -> None:
    # held: what steps cost is timed at the load, and a busy moment would switch drafts off
    with Mesh(tp, spec_k=3, spec_fixed=True) as mesh:
        ready = mesh.wait_for(m.Ready)
        assert ready.memory["head"] > 0 and ready.memory["head_kv"] > 0
        tokens, runs = serve(mesh)
        assert tokens == plain
        assert max(run.drafted or 0 for run in runs) == 3
        assert all(not run.drafted for run in runs if run.request_id == 5)
        assert mesh.stop() == [0] * tp


class Counting(SoloCollective):
    """A mesh of one that counts what would travel."""

    def __init__(self) -> None:
        self.broadcasts = 0

    def broadcast(self, x, root=0):  # type: ignore[no-untyped-def]
        self.broadcasts += 1
        return x


def test_a_step_has_one_broadcast_at_most_and_both_backends_give_the_same() -> None:
    """The mesh backend over one shard: the plan is shared before it runs, and each step that drafts says so once."""
    benches = tiny().bench(drafts=3), tiny().bench(drafts=3)
    collective, shared = Counting(), []
    executor: Executor = benches[1].executor
    vocab = tiny().config.vocab_size

    def share(plan: StepPlan) -> None:
        shared.append(plan.number)

    leader: Leader = benches[1].leader
    leader.backend = MeshBackend(executor, collective, vocab, share)
    for bench in benches:
        for request_id, question in enumerate(questions(3), 1):
            bench.submit(request_id, tiny().chat(question), max_tokens=20, temperature=request_id % 2 * 0.8)
        bench.run()
    assert benches[0].tokens() == benches[1].tokens()
    plans = benches[1].plans
    assert shared == [plan.number for plan in plans]
    assert collective.broadcasts == sum(plan.told and plan.draws > 0 for plan in plans) <= len(plans)
    backends: list[TrunkBackend] = [benches[0].leader.backend, leader.backend]
    assert isinstance(backends[0], SlotBackend)
    for backend in backends:
        assert backend.capacity == Capacity(slots=9, max_seq=400, drafts=3)
        backend.free()
        assert backend.executor.caches == []
