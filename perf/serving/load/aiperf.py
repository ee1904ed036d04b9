"""AIPerf in a virtual environment of its own in the cache: it pins many packages. One run, and its summary."""

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError, MissingToolError
from plugins.build import cache_dir

VERSION = "0.13.0"
TEMPLATE = Path(__file__).resolve().parents[1] / "aiperf" / "generate_stream.json"
DISTRIBUTIONS = {
    "ttft_ms": "time_to_first_token", "inter_token_ms": "inter_token_latency", "end_to_end_ms": "request_latency",
}  # fmt: skip
RATES = {"requests_per_s": "request_throughput", "output_tok_s": "output_token_throughput"}


@dataclass(frozen=True)
class Target:
    """An HTTP endpoint and AIPerf's own options for it."""

    name: str
    url: str
    model: str
    options: tuple[str, ...]


def generate_stream(http_url: str) -> Target:
    """Triton's own streaming URL of `ensemble`."""
    return Target(
        "ensemble generate_stream", http_url, "ensemble",
        (
            "--custom-endpoint", "/v2/models/ensemble/generate_stream", "--endpoint-type", "template",
            "--extra-inputs", f"payload_template:{TEMPLATE}", "--extra-inputs", "response_field:text_output",
        ),
    )  # fmt: skip


def openai(url: str, model: str, endpoint: str) -> Target:
    """The gateway's completions or chat endpoint."""
    forced = ("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0")
    return Target(f"gateway {endpoint}", url, model, ("--endpoint-type", endpoint, *forced))


def aiperf_at_hand() -> Path | None:
    """The program on PATH, else the installed one in the cache, else None."""
    on_path = shutil.which("aiperf")
    if on_path:
        return Path(on_path)
    return _program() if (_folder() / ".complete").is_file() else None


def find_aiperf() -> Path:
    """The program; installs it, which takes minutes and 1.2 GB, when it is neither on PATH nor in the cache.

    Raises MissingToolError when it cannot be installed.
    """
    found = aiperf_at_hand()
    if found is not None:
        return found
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").is_file():
            print(f"installing aiperf {VERSION} into {folder} (a few minutes) ...", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"aiperf=={VERSION}"]
            if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                raise MissingToolError(f"aiperf {VERSION} cannot be installed from here; put aiperf on PATH.")
            (folder / ".complete").touch()
    return _program()


def _folder() -> Path:
    return cache_dir() / f"aiperf-{VERSION}"


def _program() -> Path:
    return _folder() / "bin" / "aiperf"


def run_aiperf(
    target: Target,
    tokenizer_dir: Path,
    concurrency: int,
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    timeout_s: float,
) -> dict[str, Any]:
    """One streaming run at one concurrency, on random prompts, with ``output_tokens`` forced.

    Raises KvforgeError with AIPerf's last words when it fails, or takes longer than ``timeout_s``.
    """  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvforge-aiperf-") as folder:
        command = [
            str(find_aiperf()), "profile", "-m", target.model, "--url", target.url, *target.options, "--streaming",
            "--tokenizer", str(tokenizer_dir), "--ui", "none", "--no-gpu-telemetry", "--random-seed", "1",
            "--concurrency", str(concurrency), "--request-count", str(num_requests),
            "--synthetic-input-tokens-mean", str(input_tokens), "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", str(output_tokens), "--output-tokens-stddev", "0",
            "--output-artifact-dir", folder,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, cwd=folder
            )
        except subprocess.TimeoutExpired:
            raise KvforgeError(f"aiperf did not end within {timeout_s:.0f} s; try a lower load.") from None
        summary = Path(folder) / "profile_export_aiperf.json"
        if done.returncode or not summary.is_file():
            raise KvforgeError(f"aiperf failed on {target.name}: {' '.join(done.stdout.split()[-40:])}")
        return summarise(json.loads(summary.read_text()), num_requests)


def summarise(summary: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """The numbers kept of AIPerf's JSON summary; times in ms. A metric that it left out is left out here.

    AIPerf counts tokens by tokenizing the text it got; its inter-token latency is
    (end to end - TTFT) / (output tokens - 1) of each request.
    """
    numbers: dict[str, Any] = {name: summary[key]["avg"] for name, key in RATES.items() if key in summary}
    for name, key in DISTRIBUTIONS.items():
        if key in summary:
            numbers[name] = {q: summary[key][q] for q in ("p50", "p90", "p99") if q in summary[key]}
    answered = int(summary.get("request_count", {}).get("avg", 0))
    return {"num_requests": num_requests, "num_failed": num_requests - answered, **numbers}
