"""Flags, the TOML file, their precedence, and addresses that are refused."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from mstar.daemon import settings as settings_module
from mstar.daemon.addresses import AddressError, TcpAddress, UnixAddress, claim_unix_socket, parse_address
from mstar.daemon.devices import detect_platform
from mstar.daemon.settings import SettingsError, load_settings


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mstar.toml"
    path.write_text(text)
    return path


def test_defaults_need_no_file_and_no_flag() -> None:
    settings = load_settings({})
    assert (settings.bind, settings.line) == ("tcp://127.0.0.1:5570", "tcp://127.0.0.1:5571")
    assert (settings.tp, settings.max_num_seqs, settings.lease_s, settings.drain_s) == (1, 64, 30.0, 10.0)


def test_platform_section_overrides_the_file_and_flags_override_both(tmp_path, monkeypatch) -> None:
    path = write(
        tmp_path, 'tp = 1\nmax-seq = 100\ndtype = "fp32"\n[cpu]\ntp = 2\nmax-seq = 200\n[cuda]\ntp = 8\n'
    )
    monkeypatch.setattr(settings_module, "detect_platform", lambda device: "cpu")
    settings = load_settings({"max_seq": 300, "tp": None}, path)
    assert (settings.tp, settings.max_seq, settings.dtype) == (2, 300, "fp32")
    monkeypatch.setattr(settings_module, "detect_platform", lambda device: "cuda")
    assert load_settings({}, path).tp == 8


def test_the_device_flag_chooses_the_section(tmp_path) -> None:
    path = write(tmp_path, 'device = "cuda"\n[cpu]\nthreads = 3\n')
    assert load_settings({"device": "cpu"}, path).threads == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speed = 9", "speed"),
        ("tp = 0", "tp"),
        ('tp = "2"', "tp"),
        ("tp = true", "tp"),
        ("[cuda]\nmax-num-seqs = -1", "max-num-seqs"),
        ("[rocm]\nwarp = 1", "warp"),
        ("cpu = 3", "cpu"),
        ("tp = ", "TOML"),
        ('[cpu]\ndevice = "cuda"', "device"),
        ("lease-s = nan", "lease-s"),
    ],
)
def test_a_bad_file_is_refused_with_the_name(tmp_path, text, named) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings({}, write(tmp_path, text))


@pytest.mark.parametrize("name", ["bind", "line"])
@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5570", "tcp://192.168.1.4:1", "tcp://*:5570", "tcp://[::]:5570", "tcp://example.org:80"],
)
def test_other_than_loopback_is_refused_and_says_so(name, address) -> None:
    with pytest.raises(SettingsError, match="loopback"):
        load_settings({name: address})


def test_metrics_are_loopback_only_too() -> None:
    with pytest.raises(SettingsError, match="loopback"):
        load_settings({"metrics": "0.0.0.0:9000"})
    assert load_settings({"metrics": "localhost:0"}).metrics == "localhost:0"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"bind": "tcp://127.0.0.1"}, "port"),
        ({"bind": "tcp://127.0.0.1:99999"}, "port"),
        ({"bind": "udp://127.0.0.1:1"}, "address"),
        ({"bind": "unix:/tmp/x"}, "ipc://"),
        ({"line": "ipc:///tmp/x"}, "unix:"),
        ({"line": "unix:@abstract"}, "path"),
        ({"line": "unix:/no/such/directory/s"}, "directory"),
        ({"line": "unix:/tmp/" + "x" * 120}, "bytes"),
    ],
)
def test_a_bad_address_says_what_is_wrong(flags, named) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(flags)


def test_addresses_are_read_in_all_their_forms() -> None:
    assert parse_address("tcp://localhost:*") == TcpAddress("127.0.0.1", 0)
    assert str(parse_address("tcp://[::1]:80")) == "tcp://[::1]:80"
    assert parse_address("unix:///tmp/a") == UnixAddress(Path("/tmp/a"))
    assert str(parse_address("ipc:///tmp/a")) == "ipc:///tmp/a"


def test_stdio_takes_no_port_unless_asked() -> None:
    settings = load_settings({"stdio": True, "line": "tcp://127.0.0.1:0"})
    assert (settings.bind, settings.line) == ("off", "tcp://127.0.0.1:0")


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path) -> None:
    address = UnixAddress(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(address.path))
    with socket.socket(socket.AF_UNIX) as server:
        with claim_unix_socket(address):
            server.bind(str(address.path))
        server.listen()
        assert stat.S_IMODE(address.path.stat().st_mode) == 0o600
        with pytest.raises(AddressError, match="process listens"), claim_unix_socket(address):
            pass
    assert address.path.exists()


def test_a_file_is_never_taken_for_a_socket(tmp_path) -> None:
    address = UnixAddress(tmp_path / "notes.txt")
    address.path.write_text("mine")
    with pytest.raises(AddressError, match="not a socket"), claim_unix_socket(address):
        pass
    assert address.path.read_text() == "mine"


def test_cpu_is_cpu_whatever_torch_was_built_for() -> None:
    assert detect_platform("cpu") == "cpu"


def test_a_daemon_that_nobody_could_reach_is_refused():
    with pytest.raises(SettingsError, match="--bind, --line or --stdio"):
        load_settings({"bind": "off", "line": "off"})
    load_settings({"stdio": True})
