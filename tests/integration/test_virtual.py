"""A directory without weights is served like one whose files were written from the same seed."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.scripts.make_checkpoint import make_config, write_checkpoint, write_virtual
from tests.support.daemons import ZmqClient, generate, run
from tests.support.live_daemon import live_daemon

PROMPTS = [[7, 300, 21, 4000], [11] * 40, list(range(100, 400))]


async def served(
    client: ZmqClient, model: str, tokens: int, **fields: Any
) -> tuple[list[list[int]], list[dict[str, Any]], list[str]]:
    """Ids and `done` of every prompt, and the load's notes. Unloads."""
    loaded = await client.load(model=model, max_num_seqs=4, max_seq=1024, **fields)
    assert loaded["type"] == "loaded", loaded
    ids, done = [], []
    for number, prompt in enumerate(PROMPTS):
        request = generate(number, prompt_ids=prompt, max_tokens=tokens, ignore_eos=True, return_ids=True)
        await client.send(**request)
        events = await client.until("done", "error")
        assert events[-1]["type"] == "done", events[-1]
        ids.append([i for event in events if event["type"] == "token" for i in event["ids"]])
        done.append(events[-1])
    await client.ask(type="unload")
    return ids, done, loaded["notes"]


@pytest.mark.parametrize("acceptance", [None, 0.7])
def test_a_virtual_model_speaks_as_the_written_one(tmp_path, acceptance):
    config = make_config("0.8B", 8, "fp32", acceptance, layers=4, vocab=6144)
    tokens = 24 if acceptance is None else 60
    write_checkpoint(tmp_path / "files", config, 5, 1 << 30, lambda _: None)
    write_virtual(tmp_path / "virtual", config, 5)

    async def test() -> None:
        client = ZmqClient(live)
        wanted, _, notes = await served(client, str(tmp_path / "files"), tokens, tp=1, spec={"mtp": "off"})
        assert not any("no real model" in note for note in notes)
        assert all(len(ids) == tokens for ids in wanted) and wanted[0] != wanted[1]
        for tp in (1, 2):
            spec = {"mtp": "on", "mtp_k": 2}
            ids, done, notes = await served(client, str(tmp_path / "virtual"), tokens, tp=tp, spec=spec)
            assert ids == wanted
            (note,) = [note for note in notes if "no real model" in note]
            assert ("PLANTED acceptance 0.7" in note) is (acceptance is not None)
            if acceptance is not None:
                accepted = sum(event["spec"]["accepted"] for event in done)
                drafted = sum(event["spec"]["drafted"] for event in done)
                # 180 tokens in steps of 2.2: a standard error is 0.04
                assert accepted / drafted == pytest.approx((0.7 + 0.49) / 2, abs=0.15)
        client.close()

    with live_daemon("--mtp-fixed") as live:
        run(test(), 100)
