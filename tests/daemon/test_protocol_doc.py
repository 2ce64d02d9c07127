"""docs/protocol.md says what the types say."""

import json
import re

from mstar.daemon import protocol_doc
from mstar.daemon.protocol import EVENTS, REQUESTS, parse_request


def test_the_page_is_not_stale():
    assert protocol_doc.main(["--check"]) == 0, "run python -m mstar.daemon.protocol_doc"


def test_a_stale_page_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol_doc, "PAGE", tmp_path / "docs" / "protocol.md")
    assert protocol_doc.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert protocol_doc.main([]) == 0
    assert protocol_doc.main(["--check"]) == 0
    assert protocol_doc.main(["--what"]) == 2


def test_every_type_and_field_is_on_the_page_with_a_meaning():
    page = protocol_doc.render()
    for name in [*REQUESTS, *EVENTS]:
        assert f"### `{name}`" in page
    for model in REQUESTS.values():
        for field, info in model.model_fields.items():
            assert field == "type" or f"| `{field}` |" in page
            assert field == "type" or info.description
    assert not [line for line in page.splitlines() if re.search(r"\|\s*\|$", line)]
    links = set(re.findall(r"\]\(#(\w+)\)", page))
    assert links <= {heading.lower() for heading in re.findall(r"^### `?(\w+)`?$", page, re.MULTILINE)}


def test_the_requests_of_the_example_session_are_valid():
    page = protocol_doc.render()
    sent = [json.loads(line[2:]) for line in page.splitlines() if line.startswith("> {")]
    assert [m["type"] for m in sent] == ["load", "generate", "generate", "unload"]
    for message in sent:
        if message.get("top_p") != 2:
            parse_request(message)
