"""The limits of `kvforge serve` reach the engine process."""

import argparse
from pathlib import Path

import pytest

from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options
from kvforge.serving.server.options import ServerOptions, engine_command


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


@pytest.mark.parametrize(
    "given",
    [
        {"speculative": None, "early_exit_threshold": None},
        {"speculative": None, "early_exit_threshold": 0.75},
        {"speculative": None, "early_exit_threshold": 0.75, "early_exit_prompts": True},
        {"speculative": SpeculativeConfig("ngram"), "early_exit_threshold": None},
        {"speculative": SpeculativeConfig("ngram", 7, 3, 9), "early_exit_threshold": None},
        {"speculative": SpeculativeConfig("draft_model", 2, draft_engine=Path("small")), "early_exit_threshold": None},
        {"speculative": SpeculativeConfig("suffix", suffix_sharing="all"), "early_exit_threshold": None},
        {"speculative": SpeculativeConfig("early_exit", 6), "early_exit_threshold": None},
    ],
)
def test_the_engine_process_reads_the_same_speculation(given: dict) -> None:
    command = engine_command(Path("engine"), ServerOptions(**given))
    parser = argparse.ArgumentParser()
    add_speculation_options(parser)
    assert speculation_options(parser.parse_args(command[command.index("--log-format") + 2 :])) == given


def test_the_log_s_form_and_level_are_the_server_s() -> None:
    command = engine_command(Path("engine"), ServerOptions(log_level="INFO", log_format="json"))
    assert command[command.index("--log-level") :] == ["--log-level", "INFO", "--log-format", "json"]
