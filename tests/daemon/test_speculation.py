"""Speculation as the daemon tells it: decided at load, narrowed by requests, cut and counted with the text."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.daemon.events import LoadedSpec
from mstar.daemon.requests import SpecRequest
from mstar.daemon.speculation import SpecCounts
from mstar.ranks.messages import TokenRun
from tests.support import checkpoints
from tests.support.daemons import LineClient, ZmqClient, daemon, generate, run, text_of

LOADED = LoadedSpec(mtp=True, k=3, draft_head="bf16", reason=None)
LETTERS = list(range(65, 91))  # "bcdefgh…" with the built-in vocabulary
WINDOWS = {"windows": [[3, 3]], "ids": LETTERS}
PLAIN = {
    "mtp": False, "k": 0, "steps": 0, "drafted": 0, "accepted": 0, "tau": 0.0, "tokens_per_step": 1.0,
    "drafted_by_depth": [], "accepted_by_depth": [],
}  # fmt: skip


# One request's counts


def counts(**fields: Any) -> SpecCounts:
    return SpecCounts.of(SpecRequest(**fields), LOADED)


def test_the_prefills_token_is_of_no_step_and_tau_counts_steps_without_drafts() -> None:
    spec = counts()
    runs = [(None, 0, 1), (3, 3, 4), (3, 0, 1), (0, 0, 1), (2, 1, 2)]
    for drafted, accepted, kept in runs:
        spec.take(TokenRun(1, [9] * kept, drafted=drafted, accepted=accepted), kept)
    report = spec.report()
    assert (report.steps, report.drafted, report.accepted) == (4, 8, 4)
    assert (report.drafted_by_depth, report.accepted_by_depth) == ([3, 3, 2], [2, 1, 1])
    assert (report.tau, report.tokens_per_step) == (1.0, 2.0)
    assert report.tokens_per_step * report.steps == sum(kept for _, _, kept in runs) - 1


@pytest.mark.parametrize(("kept", "accepted"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_drafts_behind_a_cut_are_not_accepted(kept: int, accepted: int) -> None:
    spec = counts()
    spec.take(TokenRun(1, [1, 2, 3, 4], drafted=3, accepted=3), kept)
    assert (spec.drafted, spec.accepted, spec.steps) == (3, accepted, 1)


@pytest.mark.parametrize(
    ("fields", "k"), [({}, 3), ({"mtp_k": 1}, 1), ({"mtp": "off"}, 0), ({"mtp": "off", "mtp_k": 2}, 0)]
)
def test_a_request_narrows_what_was_loaded(fields: dict[str, Any], k: int) -> None:
    report = counts(**fields).report()
    assert (report.mtp, report.k) == (k > 0, k)


def test_without_speculation_every_figure_is_that_of_plain_decode() -> None:
    nothing = LoadedSpec(mtp=False, k=0, draft_head=None, reason="no head")
    for spec in (counts(mtp="off"), SpecCounts.of(SpecRequest(), nothing)):
        spec.take(TokenRun(1, [1], drafted=0), 1)
        assert spec.report() == SpecCounts().report()


# Through a daemon


def test_done_and_stats_say_what_speculation_did() -> None:
    async def body() -> None:
        script = {"windows": [[3, 2], [3, 0], [3, 3], [0, 0]], "ids": LETTERS}
        async with daemon(script) as server:
            client = ZmqClient(server)
            loaded = await client.load(spec={"mtp": "on"})
            assert loaded["spec"] == {"mtp": True, "k": 3, "draft_head": "bf16", "reason": None}
            assert (await client.ask(type="stats"))["spec"]["k"] == 3
            events = await client.generate(max_tokens=1 + 3 + 1 + 4 + 1, return_ids=True)
            assert [len(event["ids"]) for event in events[1:-1]] == [1, 3, 1, 4, 1]
            spec = events[-1]["spec"]
            assert spec == {
                "mtp": True, "k": 3, "steps": 4, "drafted": 9, "accepted": 5, "tau": 1.25,
                "tokens_per_step": 2.25, "drafted_by_depth": [3, 3, 3], "accepted_by_depth": [2, 2, 1],
            }  # fmt: skip
            plain = await client.generate(max_tokens=10, spec={"mtp": "off"})
            assert (plain[-1]["spec"], text_of(plain)) == (PLAIN, text_of(events))
            narrow = (await client.generate(max_tokens=10, spec={"mtp_k": 1}))[-1]["spec"]
            assert (narrow["k"], narrow["drafted_by_depth"], narrow["drafted"]) == (1, [5], 5)
            stats = (await client.ask(type="stats"))["spec"]
            assert (stats["k"], stats["steps"]) == (3, spec["steps"] + narrow["steps"])
            assert (stats["drafted"], stats["accepted"]) == ([8, 3, 3], [2 + narrow["accepted"], 2, 1])
            assert stats["tokens_per_step"] == stats["tau"] + 1
            client.close()

    run(body())


@pytest.mark.parametrize("face", ["zmq", "line"])
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_fault_17_a_stop_string_inside_an_accepted_run_cuts_text_ids_logprobs_usage_and_counts(
    row: int, face: str
) -> None:
    """The window "cdef" follows the prefill's "b"; the stop string ends with its row `row`."""

    async def body() -> None:
        async with daemon(WINDOWS) as server:
            client = ZmqClient(server) if face == "zmq" else await LineClient.connect(server)
            await client.load()
            stop = "bcdef"[row : row + 2]
            events = await client.generate(max_tokens=4000, stop=["never", stop], return_ids=True, logprobs=0)
            done, pieces = events[-1], events[1:-1]
            kept = 2 + row  # the token that completes the string is counted, and has its id and logprob
            assert text_of(events) == "bcdef"[:row]
            assert [token for piece in pieces for token in piece["ids"]] == LETTERS[:kept]
            scores = [entry for piece in pieces for entry in piece["logprobs"]]
            assert [(entry["id"], entry["logprob"]) for entry in scores] == [
                (token, -token / 100) for token in LETTERS[:kept]
            ]
            assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("stop", kept)
            spec = done["spec"]
            assert (spec["steps"], spec["drafted"], spec["accepted"]) == (1, 3, min(row + 1, 3))
            assert spec["accepted_by_depth"] == [int(depth <= row) for depth in range(3)]
            assert (await client.ask(type="stats"))["blocks"]["used"] == 0  # the engine forgot the rest
            client.close()

    run(body())


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_a_stop_id_or_a_length_inside_an_accepted_run_ends_it_there(row: int) -> None:
    async def body() -> None:
        async with daemon(WINDOWS) as server:
            client = ZmqClient(server)
            await client.load()
            for fields, reason in (
                ({"stop_token_ids": [LETTERS[1 + row]], "max_tokens": 4000}, "stop"),
                ({"max_tokens": 2 + row}, "length"),
            ):
                done = (await client.generate(return_ids=True, **fields))[-1]
                assert (done["finish_reason"], done["usage"]["completion_tokens"]) == (reason, 2 + row)
                assert done["spec"]["accepted"] == min(row + 1, 3)
            client.close()

    run(body())


def test_an_aborted_request_reports_what_it_had() -> None:
    async def body() -> None:
        async with daemon({**WINDOWS, "step_s": 0.01}) as server:
            client = ZmqClient(server)
            await client.load()
            await client.send(**generate(max_tokens=4000, return_ids=True))
            events = [event for _ in range(3) for event in await client.until("token")]
            await client.send(type="abort", id="a", attempt_id=0)
            events += await client.until("done")
            done = events[-1]
            produced = sum(len(event["ids"]) for event in events if event["type"] == "token")
            assert done["usage"]["completion_tokens"] == produced
            assert produced == 1 + done["spec"]["steps"] + done["spec"]["accepted"]
            client.close()

    run(body())


# What a load decides


def test_more_drafts_than_were_loaded_are_refused_by_name() -> None:
    async def body() -> None:
        async with daemon(WINDOWS) as server:
            client = ZmqClient(server)
            for load, asked in (({"mtp_k": 2}, 3), ({"mtp": "off"}, 1)):
                await client.load(spec=load)
                error = (await client.generate(spec={"mtp_k": asked}))[-1]
                assert (error["class"], error["field"]) == ("validation", "spec.mtp_k")
                assert str(load.get("mtp_k", 0)) in error["message"]
                assert (await client.generate(max_tokens=1))[-1]["type"] == "done"
                await client.ask(type="unload")
            client.close()

    run(body())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_without_a_head_serves_plainly_and_refuses_to_promise_more(tmp_path, tp: int) -> None:
    model = str(checkpoints.write_checkpoint(tmp_path / "model", tokenizer=True))

    async def body() -> None:
        async with daemon(WINDOWS) as server:
            client = ZmqClient(server)
            error = await client.load(model=model, tp=tp, spec={"mtp": "on"})
            assert (error["class"], error["field"]) == ("unsupported", "spec.mtp")
            assert (await client.ask(type="status"))["state"] == "empty"
            loaded = await client.load(model=model, tp=tp)
            assert (loaded["spec"]["mtp"], loaded["spec"]["k"], loaded["spec"]["draft_head"]) == (
                False,
                0,
                None,
            )
            assert "no MTP head" in loaded["spec"]["reason"]
            assert (await client.generate(max_tokens=5))[-1]["spec"] == PLAIN
            client.close()

    run(body())


@pytest.mark.parametrize("tp", [1, 2])
def test_drafters_that_are_not_built_are_refused_by_name_before_the_model_is_looked_for(tp: int) -> None:
    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            for field, value in (("ngram", "on"), ("dflash", "on"), ("dspark", "on"), ("draft_head", "fp8")):
                error = await client.load(model="/no/such/model", tp=tp, spec={"mtp": "off", field: value})
                assert (error["class"], error["field"]) == ("unsupported", f"spec.{field}")
                assert field in error["message"]
            client.close()

    run(body())


def test_the_daemons_flags_are_the_defaults_of_loads() -> None:
    async def body() -> None:
        async with daemon(WINDOWS, mtp="off", mtp_k=5) as server:
            client = ZmqClient(server)
            for fields, wanted in (
                ({}, (False, 0)),
                ({"spec": {"mtp_k": 2}}, (False, 0)),
                ({"spec": {"mtp": "auto"}}, (True, 5)),
                ({"spec": {"mtp": "on", "mtp_k": 1, "draft_head": "bf16"}, "tp": 2}, (True, 1)),
            ):
                spec = (await client.load(**fields))["spec"]
                assert (spec["mtp"], spec["k"]) == wanted
                assert (spec["reason"] is None) == spec["mtp"]
                await client.ask(type="unload")
            client.close()

    run(body())
