"""The engine's numbers on Triton's metrics port, under TensorRT-LLM's metric names."""

import threading
import time
from collections.abc import Callable
from typing import Any

Stats = dict[str, Any]

# family -> (label, {label value: number from LLMEngine.stats()})
FAMILIES: dict[str, tuple[str, dict[str, Callable[[Stats], float]]]] = {
    "nv_trt_llm_request_metrics": (
        "request_type",
        {
            "waiting": lambda s: s["num_waiting"],
            "scheduled": lambda s: s["num_running"],
            "max": lambda s: s["max_num_seqs"],
            "active": lambda s: s["num_waiting"] + s["num_running"],
        },
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {
            "fraction": lambda s: s["num_used_pages"] / s["num_pages"],
            "tokens_per": lambda s: s["page_size"],
            "used": lambda s: s["num_used_pages"],
            "free": lambda s: s["num_free_pages"],
            "max": lambda s: s["num_pages"],
            "reused": lambda s: s["num_reused_tokens"] // s["page_size"],
        },
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "memory_type",
        {"pinned": lambda s: 0, "gpu": lambda s: 0, "cpu": lambda s: s["num_pages"] * s["page_bytes"]},
    ),
    "nv_trt_llm_general_metrics": (
        "general_type",
        {"iteration_counter": lambda s: s["num_iterations"], "timestamp": lambda s: int(time.time())},
    ),
}


class EngineMetrics:
    """Gauges fed by `update`, set from a thread of their own because setting one talks to tritonserver."""

    def __init__(self, pb: Any, model: str, version: str) -> None:
        self._gauges: list[tuple[Any, Callable[[Stats], float]]] = []
        self._families = []
        for name, (label, values) in FAMILIES.items():
            family = pb.MetricFamily(name=name, description=name.replace("_", " "), kind=pb.MetricFamily.GAUGE)
            self._families.append(family)
            for value, read in values.items():
                labels = {label: value, "model": model, "version": version}
                self._gauges.append((family.Metric(labels=labels), read))
        self._latest: Stats | None = None
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def update(self, stats: Stats) -> None:
        """Show `stats` soon. Never blocks."""
        self._latest = stats
        self._changed.set()

    def close(self) -> None:
        """Join the thread and drop the gauges; a stub that keeps them crashes at exit."""
        self._closed = True
        self._changed.set()
        self._thread.join(timeout=5.0)
        self._gauges.clear()
        self._families.clear()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            stats = self._latest
            if stats is not None:
                for gauge, read in self._gauges:
                    gauge.set(float(read(stats)))
