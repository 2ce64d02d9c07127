"""`stats` with `trace_steps` is answered with a profile of a serving daemon's steps."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from mstar.daemon.client import Client
from tests.support.live_daemon import live_daemon


def test_a_profile_of_running_steps():
    with live_daemon() as live, Client(live.zmq_face.address) as client:
        client.load("builtin:tiny", spec={"mtp": "off"})
        asked = threading.Event()

        def talk() -> None:
            with Client(live.zmq_face.address) as other:
                while not asked.is_set():
                    other.chat("Explain rainbows.", max_tokens=40)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            event = client.stats(trace_steps=3)
        finally:
            asked.set()
            thread.join()
        assert event.trace is not None
        trace = Path(event.trace)
        assert json.loads(trace.read_text())["traceEvents"]
        trace.unlink()
        assert event.phases["launch"][3] >= 3
        assert client.stats().trace is None
