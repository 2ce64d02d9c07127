"""Speculation on the built-in model in float32, on one rank and over a mesh: tokens, logprobs and states are plain
decode's on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mstar.arch.caches import AttentionCache
from mstar.arch.head import MtpHead
from mstar.arch.trunk import Trunk
from mstar.kernels.cpu import CpuOps
from mstar.loader import resolve
from mstar.loader.checkpoint import load_shard
from mstar.loader.head import load_head
from mstar.ranks.collectives import SoloCollective
from mstar.ranks.messages import Abort
from tests.support.engines import CPU, Bench, keys_and_values, settled, tiny
from tests.support.shards import tiny_over
from tests.support.tasks import questions

KS = (1, 2, 3, 5, 8)
Request = tuple[list[int], dict[str, Any]]
Answer = tuple[list[int], list[Any], str | None]


def requests() -> dict[int, Request]:
    """Greedy and every kind of sampling, past EOS, which ends the draft's easy going."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 20, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 1.1, "logprobs": 3},
        {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logprobs": 0},
        {"max_think_tokens": 7},
    ]
    result = {}
    for number, question in enumerate(questions(8), 1):
        prompt = tiny().chat(question)
        result[number] = prompt, {"max_tokens": 44, "seed": 70 + number} | thinking() | ways[number - 1]
    return result


def thinking() -> dict[str, Any]:
    token = tiny().tokenizer.token_to_id
    return {
        "think_start_id": token("<think>"),
        "think_end_id": token("</think>"),
        "starts_in_think": True,
    }


def end_of_turn() -> int:
    token: int = tiny().tokenizer.token_to_id("<|im_end|>")
    return token


def answers(bench: Bench, given: dict[int, Request], **fields: Any) -> dict[int, Answer]:
    for request_id, (prompt, sampling) in given.items():
        bench.submit(request_id, prompt, **(sampling | fields))
    bench.run()
    result = {}
    for request_id in given:
        runs = bench.runs(request_id)
        ids = [token for run in runs for token in run.ids]
        logprobs = [entry for run in runs for entry in run.logprobs or []]
        result[request_id] = ids, logprobs, runs[-1].finish
    return result


def alike(got: dict[int, Answer], wanted: dict[int, Answer]) -> bool:
    """Equal; the logprobs of a mesh but for the order of its sums."""
    for request_id, (ids, entries, finish) in wanted.items():
        own_ids, own_entries, own_finish = got[request_id]
        if (own_ids, own_finish) != (ids, finish) or len(own_entries) != len(entries):
            return False
        for (own, own_top), (score, top) in zip(own_entries, entries, strict=True):
            scores = [own, *(value for _, value in own_top)], [score, *(value for _, value in top)]
            if [token for token, _ in own_top] != [token for token, _ in top]:
                return False
            if scores[0] != pytest.approx(scores[1], abs=1e-4):
                return False
    return got.keys() == wanted.keys()


@pytest.fixture(scope="module")
def plain() -> dict[int, Answer]:
    """Each request by itself, by an engine without a head."""
    result = {}
    for request_id, request in requests().items():
        result |= answers(tiny().bench(), {request_id: request})
    return result


def test_the_requests_are_worth_asking(plain: dict[int, Answer]) -> None:
    ids, logprobs, finish = plain[3]
    assert len(ids) == len(logprobs) == 44 and finish == "length"
    assert all(len(entry[1]) == 2 for entry in logprobs)
    end = thinking()["think_end_id"]
    assert plain[8][0].index(end) == 7  # forced: no thought of this model is that short
    assert len({tuple(ids) for ids, _, _ in plain.values()}) == 8


@pytest.mark.parametrize("k", KS)
def test_batched_answers_are_plain_ones(plain: dict[int, Answer], k: int, ranks: int) -> None:
    """Greedy, sampled, penalised and capped side by side: ids, logprobs and ends."""
    bench = tiny_over(ranks).bench(drafts=k, buckets=())
    assert alike(answers(bench, requests()), plain)
    assert sum(bench.stats().spec_accepted) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_blocks": 24},
        {"prefill_budget": 64, "mixed_budget": 64},
        {"max_num_seqs": 3},
        {"buckets": (1, 2, 4, 8)},
    ],
    ids=["preempted", "chunked", "slots reused", "padded"],
)
def test_answers_survive_preemption_chunks_reused_slots_and_padding(
    plain: dict[int, Answer], changes: dict[str, Any], ranks: int
) -> None:
    bench = tiny_over(ranks).bench(**({"drafts": 3, "buckets": ()} | changes))
    assert alike(answers(bench, requests()), plain)
    assert (bench.stats().preemptions > 0) == ("kv_blocks" in changes)


def test_alone_and_beside_plain_requests_answers_are_the_same(plain: dict[int, Answer], ranks: int) -> None:
    for request_id in (1, 3, 5, 8):
        got = answers(tiny_over(ranks).bench(drafts=3), {request_id: requests()[request_id]})
        assert alike(got, {request_id: plain[request_id]})
    bench = tiny_over(ranks).bench(drafts=3)
    mixed = {
        number: (prompt, sampling | {"spec_k": (0, None, 1)[number % 3]})
        for number, (prompt, sampling) in requests().items()
    }
    assert alike(answers(bench, mixed), plain)
    assert all(not run.drafted for number in (3, 6) for run in bench.runs(number))


def test_the_head_earns_its_keep(ranks: int) -> None:
    """A pre-norm hidden, a hole or a wrong position would show here: the text is right whatever it drafts."""
    bench = tiny_over(ranks).bench(drafts=3)
    fields = {"max_tokens": 60, "eos_ids": (end_of_turn(),)}
    answers(bench, {n: (tiny().chat(question), fields) for n, question in enumerate(questions(8, seed=4), 1)})
    stats = bench.stats()
    assert sum(stats.spec_accepted) / stats.spec_steps > 2
    rates = [a / d for a, d in zip(stats.spec_accepted, stats.spec_drafted, strict=True)]
    assert rates == sorted(rates, reverse=True)


def state_after(bench: Bench, request: Request, length: int) -> tuple[int, list[torch.Tensor]]:
    """GDN states, conv inputs, KV and the length of a request that is past `length` tokens."""
    prompt, sampling = request
    bench.submit(1, prompt, **sampling)
    bench.engine.step()
    slot = bench.scheduler.running[0].slot
    while int(bench.executor.lengths[slot]) < length:
        assert bench.engine.step()
    reached = int(bench.executor.lengths[slot])
    tensors = settled(bench, slot)
    for cache in bench.executor.caches:
        if isinstance(cache, AttentionCache):
            tensors += keys_and_values(bench, slot, reached, cache)
    return reached, tensors


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", (1, 3, 8))
def test_states_and_kv_at_the_same_position_are_plain_decodes_to_the_bit(
    k: int, sampling: dict[str, Any], ranks: int
) -> None:
    request = tiny().chat("Count from 3 to 40."), {"max_tokens": 300} | sampling
    bench = tiny_over(ranks).bench(drafts=k)
    reached, speculative = state_after(bench, request, 150)
    again, ordinary = state_after(tiny_over(ranks).bench(), request, reached)
    assert again == reached
    assert len(ordinary) == 2 * tiny().config.layer_types.count("linear_attention") + 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(speculative, ordinary, strict=True))
    assert bench.executor.ahead[1, 0] > 0


def test_the_heads_kv_is_that_of_a_head_that_followed_every_token(ranks: int) -> None:
    """Through accepted and rejected drafts, steps without drafts and chunks: as if all had been prompt."""
    prompt, sampling = requests()[1]
    bench = tiny_over(ranks).bench(drafts=3, prefill_budget=64, mixed_budget=64)
    policy = bench.scheduler.policy
    forced = iter([3, 3, 0, 3, 1, 0, 0, 2] * 20)
    policy.plan = lambda sequences: next(forced)  # type: ignore[method-assign]
    long = prompt * 6
    reached, _ = state_after(bench, (long, sampling | {"max_tokens": 40}), len(long) + 30)
    slot = bench.scheduler.running[0].slot
    chain = bench.leader._chain
    assert chain is not None
    mine = keys_and_values(bench, slot, reached, chain.cache)
    tokens = long + bench.tokens()[1]

    other = tiny_over(ranks).bench(drafts=3, max_num_seqs=1)
    other.submit(1, tokens[:reached], max_tokens=2, stop_ids=())
    other.engine.step()
    chain = other.leader._chain
    assert chain is not None
    # the last position of a prompt takes the token drawn there, which is the one that was drawn here
    theirs = keys_and_values(other, 1, reached, chain.cache)
    assert other.tokens()[1] == [tokens[reached]]
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("k", (1, 5))
def test_lengths_cut_at_each_offset_within_a_window(k: int, plain: dict[int, Answer], ranks: int) -> None:
    """max_tokens by max_tokens, and max_seq by prompts that leave as much room."""
    prompt, sampling = requests()[7]
    ids, logprobs, _ = plain[7]
    bench = tiny_over(ranks).bench(drafts=k, max_num_seqs=1)
    for most in range(1, 2 * k + 4):
        got = answers(bench, {most: (prompt, sampling | {"max_tokens": most})})
        assert alike(got, {most: (ids[:most], logprobs[:most], "length")})
        tight = tiny_over(ranks).bench(drafts=k, max_num_seqs=1, max_seq=len(prompt) + most)
        assert alike(answers(tight, {7: (prompt, sampling)}), {7: (ids[:most], logprobs[:most], "length")})


def test_mixed_batches_give_each_request_its_text_alone(plain: dict[int, Answer], ranks: int) -> None:
    """Plain ones, ones that speculate, and one that comes into their midst with a prompt of many chunks."""
    given = requests()
    long = given[3][0] * 8, given[3][1] | {"max_tokens": 12}
    alone = answers(tiny().bench(), {9: long})
    bench = tiny_over(ranks).bench(drafts=3, mixed_budget=64)
    for number in (1, 2, 3, 4, 5):
        prompt, sampling = given[number]
        bench.submit(number, prompt, **(sampling | {"spec_k": 0 if number % 2 else None}))
    for _ in range(4):
        bench.engine.step()
    got = answers(bench, {9: long})
    mixed = [plan for plan in bench.plans if plan.chunks and plan.decode_slots and plan.decode_counts]
    assert len(mixed) > 3 and any(1 in plan.decode_counts and 4 in plan.decode_counts for plan in mixed)
    assert alike(got, alone)
    assert {n: bench.tokens()[n] for n in (1, 2, 3, 4, 5)} == {n: plain[n][0] for n in (1, 2, 3, 4, 5)}


def test_a_then_b_then_a_again_and_after_an_abort_in_one_slot(plain: dict[int, Answer], ranks: int) -> None:
    bench = tiny_over(ranks).bench(drafts=3, max_num_seqs=1)
    given = requests()
    prompt, sampling = given[2]
    assert alike(answers(bench, {1: given[1]}), {1: plain[1]})
    assert alike(answers(bench, {2: given[2]}), {2: plain[2]})
    assert alike(answers(bench, {11: given[1]}), {11: plain[1]})
    bench.submit(3, prompt, **sampling)
    while not int(bench.executor.pending[1]):
        assert bench.engine.step()
    bench.engine.handle(Abort(3))
    assert alike(answers(bench, {12: given[1]}), {12: plain[1]})


@pytest.mark.parametrize("place", range(9))
def test_end_of_text_inside_a_run_cuts_ids_and_logprobs(
    place: int, plain: dict[int, Answer], ranks: int
) -> None:
    prompt, sampling = requests()[7]
    ids, logprobs, _ = plain[7]
    cut = ids.index(ids[20 + place]) + 1
    got = answers(tiny_over(ranks).bench(drafts=8), {7: (prompt, sampling | {"eos_ids": (ids[20 + place],)})})
    assert alike(got, {7: (ids[:cut], logprobs[:cut], "stop")})


@pytest.mark.parametrize("least", (0, 25))
def test_min_tokens_holds_an_end_back_within_a_window(least: int, ranks: int) -> None:
    prompt = tiny().chat("What is 12 + 30?")
    fields = {"max_tokens": 60, "eos_ids": (end_of_turn(),), "min_tokens": least, "logprobs": 1}
    ordinary = answers(tiny().bench(), {1: (prompt, fields)})
    assert least <= len(ordinary[1][0]) and ordinary[1][2] == "stop"
    for k in (1, 3, 8):
        assert alike(answers(tiny_over(ranks).bench(drafts=k), {1: (prompt, fields)}), ordinary)


@pytest.mark.parametrize("cap", range(6))
def test_thinking_budget_is_hit_at_each_offset_of_a_window(cap: int, ranks: int) -> None:
    request = tiny().chat("What is 12 + 30?"), thinking() | {"max_tokens": 24, "max_think_tokens": cap}
    ordinary = answers(tiny().bench(), {1: request})
    assert thinking()["think_end_id"] in ordinary[1][0][: cap + 1]
    assert alike(answers(tiny_over(ranks).bench(drafts=5), {1: request}), ordinary)


def test_equal_seeds_in_different_batches_draw_equal_tokens(ranks: int) -> None:
    request = tiny().chat("Write a short story about a lantern."), {"temperature": 1.0, "seed": 5}
    alone = answers(tiny().bench(), {9: request})
    crowd = {n: (tiny().chat(q), {"temperature": 1.0}) for n, q in enumerate(questions(6), 1)}
    assert answers(tiny_over(ranks).bench(drafts=3), crowd | {9: request})[9] == alone[9]


def test_the_head_is_fed_the_hidden_after_the_final_norm() -> None:
    """With a final norm that is far from flat, so that the hidden before it is not a multiple of the one after."""
    path, config = resolve("builtin:tiny"), tiny().config
    with torch.inference_mode():
        weights = load_shard(path, config, 0, 1, "fp32")
        weights["norm.weight"] = torch.linspace(-0.8, 3.0, config.hidden_size)
        trunk = Trunk(config, weights, dtype=torch.float32, device=CPU, collective=SoloCollective())
        head = MtpHead(config, load_head(path, config, "fp32"), trunk.ops, trunk.embedding, trunk.lm_head)
    fed: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []

    class Model:
        layers = trunk.layers
        logits = staticmethod(trunk.logits)

        def prefill(self, *args: Any, **fields: Any) -> torch.Tensor:
            seen.append(trunk.prefill(*args, **fields))
            return seen[-1]

        def decode(self, *args: Any) -> torch.Tensor:
            seen.append(trunk.decode(*args))
            return seen[-1]

    class Head:
        draft = staticmethod(head.draft)

        def __call__(self, ids: torch.Tensor, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            fed.append(hidden)
            return head(ids, hidden, *rest)

    # the trunk's own rows, normed by hand from what its layers give
    inner: list[torch.Tensor] = []
    run = trunk._run
    trunk._run = lambda *args: inner.append(run(*args)) or inner[-1]  # type: ignore[func-returns-value,method-assign]
    bench = tiny().bench(drafts=2)
    chain = bench.leader._chain
    assert chain is not None
    chain._head = Head()
    bench.executor.model = Model()
    bench.submit(1, tiny().chat("What is 1 + 2?"), max_tokens=4)
    bench.engine.step()
    x = inner[0].double()
    normed = x / (x.square().mean(1, keepdim=True) + config.rms_norm_eps).sqrt()
    normed *= 1 + torch.linspace(-0.8, 3.0, config.hidden_size).double()
    assert fed[0].shape == inner[0].shape
    assert torch.allclose(fed[0].double(), normed, rtol=1e-5, atol=1e-5)


def test_the_torch_reference_of_the_operations_speculates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU without kernels of ours runs: prompts, ragged windows and the chain, in chunks and batches."""
    native = tiny()  # before the reference is asked for
    monkeypatch.setattr(CpuOps, "unavailable", staticmethod(lambda *_: "asked for the reference"))
    path, config = resolve("builtin:tiny"), native.config
    with torch.inference_mode():
        weights = load_shard(path, config, 0, 1, "fp32")
        trunk = Trunk(config, weights, dtype=torch.float32, device=CPU, collective=SoloCollective())
        head = MtpHead(config, load_head(path, config, "fp32"), trunk.ops, trunk.embedding, trunk.lm_head)
    assert trunk.ops.name == "torch"
    reference = replace(native, trunk=trunk, head=head)
    given = {1: (tiny().chat("Count from 3 to 40."), {"max_tokens": 16}), 2: ([7] * 70, {"max_tokens": 12})}
    bench = reference.bench(drafts=3, prefill_budget=64, mixed_budget=64)
    assert answers(bench, given) == answers(reference.bench(), given)
    assert sum(bench.stats().spec_accepted) > 0
