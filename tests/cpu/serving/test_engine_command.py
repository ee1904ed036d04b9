"""The limits of `kvforge serve` reach the engine process."""

from pathlib import Path

import pytest

from kvforge.serving.options import ServerOptions, engine_command


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (ServerOptions(), []),
        (ServerOptions(max_seq_len=128), ["--max-seq-len", "128"]),
        (ServerOptions(max_num_seqs=3, max_num_tokens=64), ["--max-num-seqs", "3", "--max-num-tokens", "64"]),
        (ServerOptions(kv_cache_gib=0.5, enable_prefix_cache=False), ["--kv-cache-gib", "0.5", "--no-prefix-cache"]),
    ],
)
def test_limits_become_flags(options: ServerOptions, flags: list[str]) -> None:
    command = engine_command(Path("engine"), options)
    assert command[command.index("--log-format") + 2 :] == flags


def test_the_log_s_form_and_level_are_the_server_s() -> None:
    command = engine_command(Path("engine"), ServerOptions(log_level="INFO", log_format="json"))
    assert command[command.index("--log-level") :] == ["--log-level", "INFO", "--log-format", "json"]
