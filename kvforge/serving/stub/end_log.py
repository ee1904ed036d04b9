"""The log line of a request that the engine had."""

from kvforge.serving.logs.request_log import log_request, logs_requests
from kvforge.serving.stub.active import ActiveRequest


def log_end(active: ActiveRequest, status: str, ended: float, error: str | None = None) -> None:
    """The line of a request that the engine had: `path` is how it came, times are in milliseconds."""
    if not logs_requests():
        return
    metrics = next((s.metrics for s in active.sequences if s.metrics), None) or {}
    log_request(
        "tensorrt_llm",
        active.client_id,
        status,
        path="text" if active.lane is not None else "direct",
        tokens_in=sum(len(s.request.prompt) for s in active.sequences if s.sequence_index == 0),
        tokens_out=sum(s.num_generated for s in active.sequences),
        queue_ms=_between(metrics, "arrival", "first_scheduled"),
        ttft_ms=_between(metrics, "arrival", "first_token"),
        total_ms=round((ended - active.arrived) * 1e3, 2),
        error=error,
    )


def _between(metrics: dict[str, int], start: str, end: str) -> float | None:
    times = [metrics.get(f"{name}_monotonic_ns", 0) for name in (start, end)]
    return round((times[1] - times[0]) / 1e6, 2) if all(times) else None
