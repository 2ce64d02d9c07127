"""What `status` and `stats` cost the daemon."""

import importlib.metadata

from mstar.daemon import reports


def test_version_is_read_from_disk_once(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or "1.2")
    reports._version.cache_clear()
    try:
        assert [reports._version() for _ in range(3)] == ["1.2"] * 3
        assert asked == ["mstar"]
    finally:
        reports._version.cache_clear()
