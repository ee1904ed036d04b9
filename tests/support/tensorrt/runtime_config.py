"""What contexts of TensorRT for RTX are made with, told by an engine that makes none."""

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class Cache:
    """A runtime cache that takes what begins with "good", and to which each context adds."""

    def __init__(self) -> None:
        self.content = b"empty"

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(b"good"):
            self.content = data
            return True
        return False

    def serialize(self) -> bytes:
        return self.content


class Config:
    """Takes what an IRuntimeConfig takes."""

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Engine:
    """Notes the configurations of its contexts; each compiles something."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, config: Config) -> str:
        self.configs.append(config)
        config.cache.content = b"good" + bytes(len(self.configs))
        return "context"


def answer(trt: ModuleType, question: None) -> dict[str, Any]:
    """What `ask_rtx` asks: the settings of contexts, and what is kept beside the plan."""
    from kvforge.tensorrt import rtx_contexts

    said: dict[str, Any] = {}
    for name in ("Config", "Cache"):  # what stands in has the methods of NVIDIA's
        own, real = globals()[name], getattr(trt, f"IRuntime{name}")
        assert all(hasattr(real, method) for method in vars(own) if not method.startswith("__"))
    with tempfile.TemporaryDirectory() as temporary, mock.patch("torch.cuda.get_device_name", lambda: "NVIDIA L4 (x)"):
        plan = Path(temporary) / "lower.plan"
        engine = Engine()
        contexts = rtx_contexts.RtxContexts(engine, plan)
        assert [contexts.make(repeated) for repeated in (False, True)] == ["context"] * 2
        said["settings"] = [
            [
                config.allocation.name,
                config.cuda_graph_strategy.name,
                config.dynamic_shapes_kernel_specialization_strategy.name,
            ]
            for config in engine.configs
        ]
        said["one_cache"] = engine.configs[0].cache is engine.configs[1].cache
        contexts.keep()
        said["files"] = [file.name for file in plan.parent.iterdir()]
        (file,) = plan.parent.iterdir()
        said["content"] = list(file.read_bytes())
        before = file.stat().st_mtime_ns, file.stat().st_ino
        again = rtx_contexts.RtxContexts(Engine(), plan)
        again.keep()
        said["unchanged"] = before == (file.stat().st_mtime_ns, file.stat().st_ino)
        file.write_bytes(b"of another driver")
        rtx_contexts.RtxContexts(Engine(), plan).keep()
        said["replaced"] = file.read_bytes().decode()
        with mock.patch.object(rtx_contexts, "write_kept", side_effect=OSError(30, "Read-only file system")):
            contexts = rtx_contexts.RtxContexts(engine, plan)
            contexts.make(False)
            contexts.keep()
        said["after_a_failure"] = file.read_bytes().decode()
    return said
