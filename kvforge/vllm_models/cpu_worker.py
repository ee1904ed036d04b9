"""vLLM's worker for CPUs, as the processes of its ranks load it by its name."""

from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

REGION = "-cpushm_"
"""In the names of the regions of shared memory by which vLLM's C++ kernels talk between ranks."""


class KvforgeCpuWorker(CPUWorker):
    """vLLM's worker, which may use AMX, stays alive at seeded prompts and leaves no shared memory behind."""

    def init_device(self) -> None:
        """As vLLM's, between two more things.

        Linux lets a process use AMX once it has asked. vLLM 0.32 leaves that to the products of torch, of which the
        first may be too small for AMX; its own attention then ends the process.

        The regions lose their names, so that they go with the last process that has them, however it ends. All ranks
        of a region have opened it: vLLM waits for them.
        """
        torch.cpu._init_amx()
        super().init_device()
        for region in _regions():
            region.unlink(missing_ok=True)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; rows whose tokens are thrown away draw from the process's generator, not from their request's.

        vLLM samples every row of a step, also of a prompt whose end is in a later one, and then turns the generator of
        a seeded request back by its offset. A CPU's generators have none, so vLLM 0.32 ends there.
        """
        runner = self.model_runner
        generators: dict[int, Any] = runner.input_batch.generators
        thrown_away = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        kept = {row: generators.pop(row) for row in thrown_away if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)


def _regions() -> set[Path]:
    """Those that this process has, by its map of memory."""
    maps = Path("/proc/self/maps")
    words = maps.read_text().split() if maps.exists() else []
    return {Path(word) for word in words if word.startswith("/dev/shm/") and REGION in word}
