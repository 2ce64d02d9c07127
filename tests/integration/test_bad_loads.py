"""A load that cannot be is refused by name, and the daemon is as if nothing had been asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints
from tests.support.daemons import Client, connect, generate, run
from tests.support.refusals import alive, bad, refused


def without_config(path: Path) -> dict[str, Any]:
    (path / "config.json").unlink()
    return {}


def truncated(path: Path) -> dict[str, Any]:
    checkpoints.truncate_weights(path)
    return {}


def cut_in_the_header(path: Path) -> dict[str, Any]:
    checkpoints.truncate_weights(path, (path / "model.safetensors").stat().st_size - 20)
    return {}


def empty_weights(path: Path) -> dict[str, Any]:
    (path / "model.safetensors").write_bytes(b"")
    return {}


def corrupt(path: Path) -> dict[str, Any]:
    checkpoints.corrupt_header(path)
    return {}


def missing_tensor(path: Path) -> dict[str, Any]:
    checkpoints.drop_tensor(path, "model.layers.1.mlp.up_proj.weight")
    return {"names": "layers.1.mlp.up_proj.weight"}


def wrong_shape(path: Path) -> dict[str, Any]:
    checkpoints.misshape_tensor(path, "model.layers.3.self_attn.k_proj.weight")
    return {"names": "layers.3.self_attn.k_proj.weight"}


def wrong_architecture(path: Path) -> dict[str, Any]:
    checkpoints.edit_config(path, architectures=["LlamaForCausalLM"], model_type="llama")
    return {"names": "llama", "class": "unsupported"}


def config_that_is_no_json(path: Path) -> dict[str, Any]:
    (path / "config.json").write_text("{")
    return {}


def without_tokenizer(path: Path) -> dict[str, Any]:
    (path / "tokenizer.json").unlink()
    return {"names": "tokenizer.json"}


def broken_tokenizer(path: Path) -> dict[str, Any]:
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return {"names": "tokenizer"}


@pytest.mark.parametrize(
    "damage",
    [
        without_config,
        truncated,
        cut_in_the_header,
        empty_weights,
        corrupt,
        missing_tensor,
        wrong_shape,
        wrong_architecture,
        config_that_is_no_json,
        without_tokenizer,
        broken_tokenizer,
    ],
)
def test_damaged_checkpoint_is_refused_by_name(live, tmp_path, damage):
    checkpoints.write_checkpoint(tmp_path / "model", tokenizer=True)
    expected = {"class": "validation", "names": "", **damage(tmp_path / "model")}

    async def test() -> None:
        for face in ("zmq", "line"):
            client = await connect(live, face)
            await client.send(type="load", model=str(tmp_path / "model"), id="bad")
            event = (await client.until("loaded", "error"))[-1]
            assert (event["type"], event.get("class")) == ("error", expected["class"]), event
            assert event["id"] == "bad"
            assert expected["names"] in event["message"], event
            await as_if_nothing_was_asked(client)
            client.close()

    run(test())


async def as_if_nothing_was_asked(client: Client) -> None:
    status = await client.ask(type="status")
    assert (status["state"], status["ranks"]) == ("empty", []), status
    await alive(client)


@pytest.mark.parametrize(
    ("error_class", "field", "fields"),
    [
        bad("validation", "model", model="/nowhere/at/all"),
        bad("validation", "model", model="nobody/has-this-model"),
        bad("validation", "model", model="builtin:huge"),
        bad("validation", "model", model=""),
        bad("validation", "model", model="a\0b"),
        bad("validation", "model", model=3),
        bad("validation", "model", model=str(Path(__file__))),
        bad("validation", "tp", tp=3),
        bad("validation", "tp", tp=0),
        bad("validation", "tp", tp="2"),
        bad("validation", "max_seq", max_seq=10**6),
        bad("validation", "max_seq", max_seq=-1),
        bad("validation", "memory_fraction", memory_fraction=1.5),
        bad("validation", "max_num_seqs", max_num_seqs=2**40),
        bad("validation", "dtype", dtype="int4"),
        bad("validation", "spec.mtp_k", spec={"mtp_k": 0}),
        bad("validation", None, overrides={"hidden_size": -1}),
        bad("validation", None, overrides={"no_such_field": 1}),
        bad("validation", "nonsense", nonsense=1),
        bad("unsupported", "kv_dtype", kv_dtype="q8"),
        bad("unsupported", "spec.draft_head", spec={"draft_head": "fp8"}),
        bad("unsupported", "spec.ngram", spec={"ngram": "on"}),
        bad("unsupported", "spec.dflash", spec={"dflash": "on"}),
        bad("unsupported", "spec.dspark", spec={"dspark": "on"}),
    ],
)
def test_bad_load_is_refused_by_name(live, error_class, field, fields):
    async def test() -> None:
        for face in ("zmq", "line"):
            client = await connect(live, face)
            await refused(client, error_class, field, **{"type": "load", "model": "builtin:tiny", **fields})
            await as_if_nothing_was_asked(client)
            client.close()

    run(test())


def test_speculation_by_name_without_a_head_is_refused(live, tmp_path):
    model = str(checkpoints.write_checkpoint(tmp_path / "model", tokenizer=True))

    async def test() -> None:
        for face in ("zmq", "line"):
            client = await connect(live, face)
            await refused(client, "unsupported", "spec.mtp", type="load", model=model, spec={"mtp": "on"})
            await as_if_nothing_was_asked(client)
            client.close()

    run(test())


def test_nothing_but_a_load_works_before_one_and_unload_works_once(live, tmp_path):
    model = str(checkpoints.write_checkpoint(tmp_path / "model", tokenizer=True))

    async def test() -> None:
        clients = [await connect(live, face) for face in ("zmq", "line")]
        for client in clients:
            for request in (generate(), {"type": "unload"}, {"type": "stats"}, {"type": "reset"}):
                await refused(client, "no_model", **request)
        first, second = clients
        await first.send(type="load", model=model, max_seq=64, max_num_seqs=2)
        assert (await first.receive())["type"] == "load_progress"
        await refused(second, "busy", type="load", model="builtin:tiny")
        await refused(second, "no_model", **generate())
        assert (await refused(second, "busy", type="unload"))["retryable"]
        assert (await first.until("loaded", "error"))[-1]["type"] == "loaded"
        assert (await second.generate(max_tokens=3))[-1]["type"] == "done"
        assert (await second.ask(type="unload"))["type"] == "unloaded"
        for client in clients:
            await refused(client, "no_model", type="unload")
            await as_if_nothing_was_asked(client)
            client.close()

    run(test())
