"""What a refusal looks like from outside: one error of the right class, and a connection that goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.daemons import Client


def bad(error_class: str, field: str | None, **fields: Any) -> Any:
    names = "-".join(f"{name}={str(value)[:24]}" for name, value in fields.items())
    return pytest.param(error_class, field, fields, id=names.replace(" ", "") or "nothing")


async def refused(
    client: Client, error_class: str, field: str | None = None, **message: Any
) -> dict[str, Any]:
    """Sends, and expects one error and a connection that goes on."""
    event = await client.ask(**message)
    assert (event["type"], event.get("class")) == ("error", error_class), event
    assert field is None or event.get("field") == field, event
    assert event["message"]
    await alive(client)
    return event


async def alive(client: Client) -> None:
    """The next event is the answer to a ping: nothing else was on its way, and the connection is usable."""
    assert await client.ask(type="ping", id="still") == {"type": "pong", "id": "still"}
