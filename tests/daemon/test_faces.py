"""Both faces at their edges: whatever arrives, a typed error and further service; whoever leaves, no trace."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from mstar.daemon import codec
from mstar.daemon.addresses import AddressError
from mstar.daemon.line_face import LineSplitter
from mstar.daemon.protocol import ProtocolError
from mstar.daemon.server import Server
from mstar.daemon.settings import load_settings
from tests.support.daemons import LineClient, ZmqClient, classes, connect, daemon, generate, run

SLOW = {"step_s": 0.01}
ROOT = Path(__file__).parents[2]


async def until_idle(server: Server) -> None:
    while len(server.registry):
        await asyncio.sleep(0.01)


def test_nonsense_is_malformed_and_the_line_connection_goes_on() -> None:
    lines = [
        b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}{}", b'{"type": NaN}', b"\0" * 100,
        b'{"type":"ping"', b"[" * 100_000, b'{"type":"ping","id":"\\ud800"}',
    ]  # fmt: skip

    async def body() -> None:
        async with daemon() as server:
            client = await LineClient.connect(server)
            for line in lines:
                await client.send_raw(line + b"\n")
                assert (await client.receive())["class"] in ("malformed", "validation"), line
            await client.send_raw(b"\n  \r\n")  # empty lines are nothing
            assert (await client.ask(type="ping", id=1)) == {"type": "pong", "id": 1}
            client.close()

    run(body())


def test_nonsense_is_malformed_and_the_zmq_connection_goes_on() -> None:
    good = msgpack.packb({"type": "ping", "id": 1})
    frames = [
        (b"",), (b"\xc1",), (good[:-1],), (good + b"\0",), (b"\x91" * 2000,), (b"", good), (good, good),
        (msgpack.packb([1]),), (msgpack.packb(msgpack.ExtType(3, b"x")),), (b"\xdf\xff\xff\xff\xff",),
    ]  # fmt: skip

    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            for message in frames:
                await client.send_raw(*message)
                assert (await client.receive())["class"] == "malformed", message
            assert (await client.ask(type="ping", id=1)) == {"type": "pong", "id": 1}
            client.close()

    run(body())


def test_types_and_fields_are_refused_by_name_on_both_faces() -> None:
    async def body() -> None:
        async with daemon() as server:
            for face in ("zmq", "line"):
                client = await connect(server, face)
                unknown = await client.ask(type="dance", id=4)
                assert (unknown["class"], unknown["id"], "dance" in unknown["message"]) == (
                    "validation",
                    4,
                    True,
                )
                assert (await client.ask(type="ping", extra=1))["field"] == "extra"
                assert (await client.ask(type="load", model=5))["field"] == "model"
                assert (await client.ask(id=1))["field"] == "type"
                client.close()

    run(body())


def test_a_message_over_the_limit_is_refused_and_the_connection_stays() -> None:
    big = "x" * (9 * 2**20)

    async def body() -> None:
        async with daemon() as server:
            for face in ("zmq", "line"):
                client = await connect(server, face)
                await client.send(**generate(prompt=big))
                error = await client.receive()
                assert (error["class"], "limit" in error["message"]) == ("malformed", True)
                assert (await client.ask(type="ping", id=2))["id"] == 2
                client.close()

    run(body())


def test_past_the_hard_limit_the_connection_is_closed() -> None:
    async def body() -> None:
        async with daemon() as server:
            client = await LineClient.connect(server)

            async def flood() -> None:
                try:
                    for _ in range(80):
                        await client.send_raw(b"x" * 2**20)
                except ConnectionError:
                    pass

            flooding = asyncio.create_task(flood())
            answers = []
            with pytest.raises(ConnectionError):
                while True:
                    answers.append(await client.receive())
            assert "malformed" in classes(answers)[:1]
            await flooding
            other = await LineClient.connect(server)
            assert (await other.ask(type="ping"))["type"] == "pong"
            other.close()

            zmq_client = ZmqClient(server)
            await zmq_client.send_raw(bytes(codec.HARD_LIMIT_BYTES + 1))
            second = ZmqClient(server)
            assert (await second.ask(type="ping"))["type"] == "pong"
            second.close()
            zmq_client.close()

    run(body())


def test_lines_come_out_whole_however_they_are_cut(monkeypatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10)
    monkeypatch.setattr(codec, "HARD_LIMIT_BYTES", 30)
    data = b"one\n" + b"x" * 10 + b"\n" + b"y" * 11 + b"\n\ntwo\n" + b"z" * 25 + b"\nthree\n"
    expected = [b"one", b"x" * 10, "refused", b"", b"two", "refused", b"three"]
    for size in (1, 2, 3, 7, 11, 12, 13, len(data)):
        splitter, found = LineSplitter(), []
        for start in range(0, len(data), size):
            splitter.feed(data[start : start + size])
            while True:
                try:
                    line = splitter.next()
                except ProtocolError:
                    found.append("refused")
                    continue
                if line is None:
                    break
                found.append(line)
        assert found == expected, size
    splitter = LineSplitter()
    splitter.feed(b"x" * 20)
    with pytest.raises(ProtocolError):
        splitter.next()
    splitter.feed(b"x" * 20)
    with pytest.raises(ValueError, match="more than 30"):
        splitter.next()


def test_a_web_page_cannot_post_commands() -> None:
    async def body() -> None:
        async with daemon() as server:
            client = await LineClient.connect(server)
            await client.send_raw(b'POST / HTTP/1.1\r\nHost: x\r\n\r\n{"type":"shutdown"}\n')
            assert (await client.receive())["class"] == "malformed"
            with pytest.raises(ConnectionError):
                await client.receive()
            other = await LineClient.connect(server)
            assert (await other.ask(type="ping"))["type"] == "pong"
            other.close()

    run(body())


def test_unix_sockets_are_private_and_removed_at_the_end(tmp_path) -> None:
    ipc, unix = tmp_path / "z", tmp_path / "l"

    async def body() -> None:
        async with daemon(bind=f"ipc://{ipc}", line=f"unix:{unix}") as server:
            for path in (ipc, unix):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            for face in ("zmq", "line"):
                client = await connect(server, face)
                assert (await client.ask(type="ping"))["type"] == "pong"
                client.close()
            for flags in ({"bind": f"ipc://{ipc}", "line": "off"}, {"line": f"unix:{unix}", "bind": "off"}):
                with pytest.raises(AddressError, match="listens there"):
                    await Server(load_settings(flags)).start()
        assert not ipc.exists() and not unix.exists()

    run(body())


def test_a_taken_port_is_said_at_start() -> None:
    async def body() -> None:
        async with daemon() as server:
            assert server.zmq_face and server.line_face
            for flags in (
                {"bind": server.zmq_face.address, "line": "off"},
                {"line": server.line_face.address, "bind": "off"},
            ):
                with pytest.raises(AddressError, match="cannot listen on"):
                    await Server(load_settings(flags)).start()

    run(body())


def test_a_client_that_leaves_aborts_its_requests() -> None:
    async def body() -> None:
        async with daemon(SLOW) as server:
            keeper = ZmqClient(server)
            await keeper.load()
            for face in ("zmq", "line"):
                leaver = await connect(server, face)
                for attempt in range(3):
                    await leaver.send(**generate(face, attempt_id=attempt, max_tokens=4000))
                await leaver.until("token")
                leaver.close()
                await until_idle(server)
            stats = await keeper.ask(type="stats")
            assert (stats["requests"], stats["blocks"]["used"]) == ({"abort": 6}, 0)
            keeper.close()

    run(body())


def test_a_killed_client_is_found_while_it_streams_and_by_its_lease_while_it_waits() -> None:
    script = """
import sys, msgpack, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(msgpack.packb({"type": "generate", "id": "k", "attempt_id": 0, "prompt": "x", "max_tokens": 4000}))
print("sent", flush=True)
while True:
    socket.recv()
"""

    async def body(fake: dict[str, Any], lease_s: float) -> None:
        async with daemon(fake, lease_s=lease_s) as server:
            keeper = await LineClient.connect(server)
            await keeper.load()
            assert server.zmq_face
            killed = subprocess.Popen(
                [sys.executable, "-c", script, server.zmq_face.address], stdout=subprocess.PIPE
            )
            assert killed.stdout and await asyncio.to_thread(killed.stdout.readline) == b"sent\n"
            while not len(server.registry):
                await asyncio.sleep(0.01)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            killed.stdout.close()
            await until_idle(server)
            assert server.registry.totals.ends == {"abort": 1}
            assert (await keeper.ask(type="ping"))["type"] == "pong"
            keeper.close()

    run(body(SLOW, 1000))
    run(body({"hold": True}, 0.3))


def test_any_message_renews_the_lease_and_silence_ends_it_with_a_word() -> None:
    async def body() -> None:
        async with daemon(SLOW, lease_s=2) as server:
            client = ZmqClient(server)
            await client.load()
            await client.send(**generate(max_tokens=100_000))
            for _ in range(8):
                await asyncio.sleep(0.35)
                await client.send(type="ping")
            assert len(server.registry) == 1
            end = (await client.until("done"))[-1]
            assert end["finish_reason"] == "abort"
            assert (await client.ask(type="ping", id=5))["id"] == 5  # it may come back
            client.close()

    run(body())


def test_a_client_that_does_not_read_is_cut_off_and_others_are_not_slowed(monkeypatch) -> None:
    for module in ("line_face", "zmq_face"):
        monkeypatch.setattr(f"mstar.daemon.{module}.BACKLOG_BYTES", 20_000)
    monkeypatch.setattr("mstar.daemon.zmq_face.BACKLOG_EVENTS", 100)
    monkeypatch.setattr("mstar.daemon.zmq_face._HWM", 5)

    async def body() -> None:
        async with daemon({"step_s": 0.0001, "ids": [65]}) as server:
            reader = ZmqClient(server)
            await reader.load()
            assert server.zmq_face and server.line_face
            # A DEALER whose buffers are small, and a socket that is never read.
            deaf_zmq = ZmqClient(server, rcvhwm=1, rcvbuf=4096)
            host, port = server.line_face.address.removeprefix("tcp://").rsplit(":", 1)
            deaf_line = socket.create_connection((host, int(port)))
            deaf_line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            long = {"max_tokens": 1_000_000, "logprobs": 20, "return_ids": True, "ignore_eos": True}
            for attempt in range(8):
                await deaf_zmq.send(**generate("zmq", attempt_id=attempt, **long))
                line = json.dumps(generate("line", attempt_id=attempt, **long)).encode() + b"\n"
                deaf_line.sendall(line)
            await asyncio.sleep(0.05)
            ends = server.registry.totals.ends
            # both clients' 16: one face may not have begun to read when the other one's client is cut off already
            while ends["error.overloaded"] + ends["abort"] < 16:
                events = await reader.generate("reader", max_tokens=5)
                assert events[-1]["finish_reason"] == "length"
            assert ends["error.overloaded"] == 8  # the ZeroMQ client's, which may yet read why
            assert ends["abort"] == 8  # the line client's, whose connection is gone
            terminals = []
            while len(terminals) < 8:
                event = await deaf_zmq.receive()
                if event["type"] == "error":
                    terminals.append((event["class"], event["attempt_id"]))
            assert sorted(terminals) == [("overloaded", attempt) for attempt in range(8)]
            assert (await deaf_zmq.ask(type="ping"))["type"] == "pong"
            deaf_line.close()
            deaf_zmq.close()
            reader.close()

    run(body())


def test_many_lines_in_one_piece_are_all_answered_in_order() -> None:
    async def body() -> None:
        async with daemon() as server:
            client = await LineClient.connect(server)
            await client.send_raw(b"".join(b'{"type":"ping","id":%d}\n' % i for i in range(2000)))
            assert [(await client.receive())["id"] for _ in range(2000)] == list(range(2000))
            client.close()

    run(body())


def test_stdio_serves_a_parent_and_ends_with_it() -> None:
    command = [sys.executable, "-m", "tests.support.fake_daemon", json.dumps({}), "--stdio"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout

    def ask(message: dict[str, Any], *ends: str) -> dict[str, Any]:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        while True:
            event = json.loads(process.stdout.readline())
            if event["type"] in ends:
                return event

    assert ask({"type": "ping", "id": 1}, "pong")["id"] == 1
    assert ask({"type": "load", "model": "builtin:tiny"}, "loaded", "error")["type"] == "loaded"
    assert ask(generate(max_tokens=3), "done", "error")["finish_reason"] == "length"
    pids = [rank["pid"] for rank in ask({"type": "status"}, "status")["ranks"]]
    # The last line has no newline, and the end of stdin lets it finish.
    rest, log = process.communicate(json.dumps(generate("last", max_tokens=3)), timeout=30)
    assert json.loads(rest.splitlines()[-1])["finish_reason"] == "length"
    assert process.returncode == 0, log
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_thousand_short_connections_leave_nothing(quiet) -> None:
    async def body() -> None:
        async with daemon(lease_s=0.5) as server:
            assert server.zmq_face and server.line_face
            for _ in range(20):
                clients = [await LineClient.connect(server) for _ in range(20)]
                for client in clients:
                    await client.send_raw(b'{"type":"pi')
                    client.close()
            context = zmq.Context()
            for _ in range(50):
                dealer = context.socket(zmq.DEALER)
                dealer.connect(server.zmq_face.address)
                dealer.send(msgpack.packb({"type": "ping"}))
                await asyncio.to_thread(dealer.recv)
                dealer.close(linger=0)
            deadline = time.monotonic() + 10
            while (server.zmq_face._peers or server.line_face.peers) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert not server.zmq_face._peers and not server.line_face.peers
            context.destroy(linger=0)

    run(body())
