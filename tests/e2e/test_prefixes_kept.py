"""Prefixes that outlive a server: the next one on the same folder reads them, and answers the same."""

from pathlib import Path

from kvforge.serving.health.probe import read_metrics
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.serving.server import started, streamed, wait_until

PROMPT = [3 + 7 * place % 300 for place in range(400)]


def counted(server: TritonServer, name: str) -> float:
    return sum(value for key, value in read_metrics(server.metrics_url).items() if key.startswith(f"kvforge_{name}"))


def test_a_restarted_server_reads_what_the_last_one_computed(engine_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    options = ServerOptions(kv_cache_gib=0.25, prefix_dir=folder, prefix_gib=1.0)
    with started(TritonServer(engine_dir, options)) as server:
        answer = streamed(server, PROMPT, 20)
        wait_until(lambda: len(list(folder.glob("*/*.page"))) == (400 + 19) // 16, "pages written")
        wait_until(lambda: counted(server, "prefix_written_bytes_total") > 0, "bytes counted")
        assert counted(server, "prefix_read_tokens_total") == 0
    with started(TritonServer(engine_dir, options)) as server:
        assert streamed(server, PROMPT, 20) == answer
        wait_until(lambda: counted(server, "prefix_read_tokens_total") == 384, "tokens counted")
        assert counted(server, "prefix_read_bytes_total") > 0
