"""From a model's name to its directory."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import huggingface_hub
import pytest
from huggingface_hub import errors

from mstar.loader.errors import LoadError
from mstar.loader.resolve import resolve


def refusal(model) -> LoadError:
    with pytest.raises(LoadError) as caught:
        resolve(model)
    assert (caught.value.error_class, caught.value.field) == ("validation", "model")
    return caught.value


def test_built_in_model_is_there_with_all_its_files():
    path = resolve("builtin:tiny")
    for name in ("config.json", "model.safetensors", "model.mtp.safetensors", "tokenizer.json", "README.md"):
        assert (path / name).is_file(), name


def test_unknown_built_in_names_those_there_are():
    for name in ("builtin:huge", "builtin:", "builtin:../tiny", "builtin:tiny/"):
        assert "tiny" in refusal(name).message


def test_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == (tmp_path / "owner" / "name").resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == (tmp_path / "owner").resolve()


@pytest.mark.parametrize(
    "model", ["", "  ", "/absent/model", "name", "a/b/c", "a\0b", "../x y", "x" * 10_000, "~nobody-here/x"]
)
def test_what_names_no_model_is_refused_with_what_to_give(model):
    assert refusal(model).message


def test_file_is_refused_with_a_word_about_its_directory(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "directory" in refusal(str(file)).message


def test_hub_id_fetches_only_what_serving_needs(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/name") == tmp_path
    assert asked["repo"] == "owner/name"
    names = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja",
             "pytorch_model.bin", "model.gguf", "original/model.safetensors"]  # fmt: skip
    filtered = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(filtered) == names[:4]


RESPONSE = types.SimpleNamespace(headers={}, request=None, status_code=404)


class TransportError(Exception):
    """Stands for what the hub's HTTP client raises, which is its own and changes with its version."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "neither a directory nor a hub repository"),
        (errors.GatedRepoError("no", response=RESPONSE), "accept its terms"),
        (errors.LocalEntryNotFoundError("no"), "HF_HUB_OFFLINE"),
        (errors.HfHubHTTPError("HTTP 500", response=RESPONSE), "HTTP 500"),
        (OSError(28, "No space left on device"), "No space left"),
        (TransportError("no route"), "no route"),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch, error, said):
    def snapshot_download(repo, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert said in refusal("owner/name").message


def test_offline_hub_id_is_found_in_the_cache_or_refused_without_a_network(tmp_path):
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    script = (
        "from mstar.loader import resolve, LoadError\n"
        "print(resolve('owner/name'))\n"
        "try: resolve('owner/other')\n"
        "except LoadError as error: print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    found, refused = done.stdout.splitlines()
    assert found == str(repo / "snapshots" / commit)
    assert "owner/other" in refused and "HF_HUB_OFFLINE" in refused
