"""Where the doors of `kvforge serve` are: for each an address of its own, Triton's on loopback behind a key."""

import argparse
import socket
from pathlib import Path

import pytest

from kvforge.cli import main, make_parser
from kvforge.commands.serve_doors import Doors, choose_doors
from kvforge.common.errors import KvforgeError
from kvforge.serving.server.ports import PORTS
from tests.support.serving.serve_process import FREE_OPENAI, FREE_PORTS

EVERYWHERE = "0.0.0.0"


def parse(*options: str) -> argparse.Namespace:
    return make_parser().parse_args(["serve", "ENGINE", *options])


def doors(*options: str, has_key: bool = False) -> Doors:
    return choose_doors(parse(*options), has_key)


def ips(chosen: Doors) -> dict[str, str]:
    return {name: chosen.ip(name) for name in chosen.addresses}


def test_everything_is_on_loopback_unless_told_otherwise() -> None:
    chosen = doors("--openai")
    assert ips(chosen) == dict.fromkeys(PORTS, "127.0.0.1") and chosen.ports == PORTS
    assert chosen.open_without_key == [] and chosen.warning() is None


def test_the_gateway_has_a_door_only_with_openai() -> None:
    assert list(doors().addresses) == ["http", "grpc", "metrics", "health"]


def test_without_a_key_one_address_is_for_all_doors_and_is_warned_of() -> None:
    chosen = doors("--openai", "--address", EVERYWHERE)
    assert set(ips(chosen).values()) == {EVERYWHERE}
    assert chosen.open_without_key == ["http", "grpc", "openai"]
    warning = chosen.warning()
    assert warning is not None and warning.startswith("HTTP, gRPC, OpenAI: other machines may generate here without")
    assert "\n" not in warning


def test_behind_a_key_tritons_doors_stay_on_loopback() -> None:
    chosen = doors("--openai", "--address", EVERYWHERE, has_key=True)
    assert ips(chosen) == {
        **dict.fromkeys(("http", "grpc", "metrics"), "127.0.0.1"), **dict.fromkeys(("health", "openai"), EVERYWHERE)
    }  # fmt: skip
    assert chosen.open_without_key == [] and chosen.warning() is None


def test_behind_a_key_an_address_of_loopback_is_kept() -> None:
    assert set(ips(doors("--openai", "--address", "127.0.0.2", has_key=True)).values()) == {"127.0.0.2"}


@pytest.mark.parametrize("name", PORTS)
@pytest.mark.parametrize("has_key", [False, True])
def test_each_door_has_an_address_of_its_own(name: str, has_key: bool) -> None:
    """Which other doors do not get."""
    chosen = doors("--openai", f"--{name}-address", EVERYWHERE, has_key=has_key)
    assert ips(chosen) == {**dict.fromkeys(PORTS, "127.0.0.1"), name: EVERYWHERE}
    generates = name in ("http", "grpc") or (name == "openai" and not has_key)
    assert chosen.open_without_key == ([name] if generates else [])


def test_lines_say_what_listens_where() -> None:
    ports = {"http": 1, "grpc": 2, "metrics": 3, "health": 4, "openai": 5}
    keyed = doors("--openai", "--address", EVERYWHERE, "--grpc-address", EVERYWHERE, has_key=True)
    assert keyed.listening(ports) == [
        "OpenAI http://0.0.0.0:5/v1 (with a key)",
        "HTTP http://127.0.0.1:1",
        "gRPC 0.0.0.0:2 (IPv6 too)",
        "metrics http://127.0.0.1:3/metrics",
        "health http://0.0.0.0:4/ready",
    ]


@pytest.mark.parametrize("name", ["", *(f"{name}-" for name in PORTS)])
@pytest.mark.parametrize("value", ["203.0.113.9", "nohost.invalid", ""])
def test_a_wrong_address_is_refused_by_its_option(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine is looked at, and with nothing said of ports."""
    monkeypatch.delenv("KVFORGE_API_KEY", raising=False)
    option = f"--{name}address"
    assert main(["serve", str(tmp_path / "none"), *FREE_OPENAI, option, value]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"kvforge: error: {option} {value!r} ") and errors.count("\n") == 1
    assert "-port" not in errors


@pytest.mark.parametrize("name", PORTS)
def test_a_taken_port_is_refused_by_its_option(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVFORGE_API_KEY", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(tmp_path / "none"), *FREE_OPENAI, f"--{name}-port", port]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"kvforge: error: cannot listen on 127.0.0.1:{port} (")
    assert f"choose another with --{name}-port" in errors and errors.count("\n") == 1


def test_one_port_for_two_doors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert main(["serve", str(tmp_path), *FREE_PORTS, "--http-port", port, "--health-port", port]) == 1
    assert f"--http-port and --health-port are both {port}; give different ones" in capsys.readouterr().err


def test_a_key_without_the_gateway_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "secret")
    assert main(["serve", str(tmp_path), *FREE_PORTS]) == 1
    assert "only the OpenAI gateway has keys: leave out --no-openai, or unset it" in capsys.readouterr().err


def test_an_empty_key_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "")
    assert main(["serve", str(tmp_path), *FREE_OPENAI, "--address", EVERYWHERE]) == 1
    assert capsys.readouterr().err == (
        "kvforge: error: $KVFORGE_API_KEY is set and empty; give it a key, or unset it to serve without one.\n"
    )


def test_the_gateways_address_is_for_the_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--no-openai", "--openai-address", "127.0.0.1"]) == 1
    assert "--openai-address is for the OpenAI gateway" in capsys.readouterr().err


def test_addresses_that_triton_takes_otherwise_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        chosen = doors("--address", "::")
    except KvforgeError:
        pytest.skip("this machine has no IPv6")
    where = chosen.listening(dict.fromkeys(PORTS, 1))
    assert where == [
        "HTTP http://[::]:1 (IPv6 alone)",
        "gRPC [::]:1",
        "metrics http://[::]:1/metrics (IPv6 alone)",
        "health http://[::]:1/ready",
    ]
