"""TensorRT for RTX: builds on any machine, for GPUs that need not be there; they compile the plan when they load it."""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvforge.common.errors import BuildError, MissingToolError, first_line
from kvforge.common.extras import how_to_install
from kvforge.tensorrt.direct_file import DirectFile
from kvforge.tensorrt.flavour import Contexts
from plugins.build import cache_dir
from plugins.errors import PluginError
from plugins.triton_cache import check_capability
from plugins.trt_plugins import register_rtx_plugins

if TYPE_CHECKING:
    import tensorrt_rtx_bindings as trt

NAME = "tensorrt-rtx"
IS_CHECKED = True
RECORDS_RUNS = True

PORTABLE = (80, 86, 89, 120)
"""What it builds for unless told otherwise."""
KNOWN = (*PORTABLE, 121)
"""What it can be told to build for, of the GPUs that run our kernels."""

_CORE, _PARSER = "libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"
_links: list[Path | tempfile.TemporaryDirectory[str]] = []
"""Where the libraries were loaded from: the parser looks there as long as the process lives."""


def load() -> Any:
    """Return the module ``tensorrt_rtx_bindings``; raises MissingToolError where it cannot be imported.

    The parser loads the core library by the name ``libtensorrt_rtx.so``, which the package lacks, from the folder that
    it was loaded from itself, and ends the process where it is not found. So both are loaded from a folder of links
    that has the name.
    """
    try:
        if not _links:
            _load_libraries()
        return importlib.import_module("tensorrt_rtx_bindings")
    except (ImportError, OSError) as error:
        raise MissingToolError(
            f"TensorRT for RTX cannot be imported ({first_line(error)}); install it with "
            f"{how_to_install('tensorrt-rtx')}."
        ) from error


def _load_libraries() -> None:
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no module tensorrt_rtx_libs")
    installed = Path(next(iter(spec.submodule_search_locations)))
    folder = links_folder(installed)
    _links.append(folder)
    for library in (_CORE, _PARSER):
        ctypes.CDLL(str(Path(folder if isinstance(folder, Path) else folder.name) / library))


def links_folder(installed: Path) -> Path | tempfile.TemporaryDirectory[str]:
    """Return a folder with links to the libraries in ``installed``: one below the cache for all processes, as one that
    is killed removes nothing; where that cannot be written, a temporary one."""
    try:
        shared = cache_dir() / NAME / hashlib.sha256(os.fsencode(installed)).hexdigest()[:16]
        shared.mkdir(parents=True, exist_ok=True)
        _link(installed, shared)
    except (OSError, PluginError):  # PluginError: there is no cache
        own = tempfile.TemporaryDirectory(prefix="kvforge-")
        _link(installed, Path(own.name))
        return own
    return shared


def _link(installed: Path, folder: Path) -> None:
    for name, library in ((_CORE, _CORE), (_PARSER, _PARSER), (_CORE.removesuffix(".1"), _CORE)):
        with contextlib.suppress(FileExistsError):  # the folder's name says where it leads
            (folder / name).symlink_to(installed / library)


def capabilities(asked: str, kv_dtype: torch.dtype) -> tuple[int, ...]:
    """Return those that are asked for, by default the portable ones with such a cache; see ``Flavour.capabilities``."""
    if asked == "auto":
        return tuple(capability for capability in PORTABLE if _refusal(kv_dtype, capability) is None)
    chosen = _current() if asked == "current" else _listed(asked)
    for capability in chosen:
        refusal = _refusal(kv_dtype, capability)
        if refusal is not None:
            raise BuildError(refusal)
    return chosen


def is_portable(asked: str) -> bool:
    """Return whether later GPUs run plans built for ``asked``, too: those of a list run on its GPUs alone."""
    return asked == "auto"


def _current() -> tuple[int, ...]:
    if not torch.cuda.is_available():
        raise BuildError("--compute-capabilities current needs a GPU, and there is none here; leave it out.")
    major, minor = torch.cuda.get_device_capability()
    return (10 * major + minor,)


def _listed(asked: str) -> tuple[int, ...]:
    known = {f"{capability // 10}.{capability % 10}": capability for capability in KNOWN}
    names = [name.strip() for name in asked.strip().removesuffix(",").split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BuildError(
            f"--compute-capabilities {unknown[0]!r} is not one that TensorRT for RTX builds for; choose auto, current, "
            f"or some of {', '.join(known)}."
        )
    return tuple(sorted({known[name] for name in names}))


def _refusal(kv_dtype: torch.dtype, capability: int) -> str | None:
    try:
        check_capability(kv_dtype, capability)
    except PluginError as error:
        return str(error)
    return None


def register_plugins() -> None:
    """Make the plugins known in this process."""
    register_rtx_plugins()


def network_flags() -> int:
    """Return no flags: networks are strongly typed."""
    return 0


def contexts(engine: "trt.ICudaEngine", plan: Path) -> Contexts:
    """Return what makes contexts that share a cache of compiled kernels beside the plan."""
    from kvforge.tensorrt.rtx_contexts import RtxContexts

    return RtxContexts(engine, plan)


def configure(config: "trt.IBuilderConfig", asked: str) -> Callable[[], None]:
    """Say which GPUs the plan is for, and have the log name every layer's datatypes; there is nothing to keep."""
    config.profiling_verbosity = load().ProfilingVerbosity.DETAILED
    if asked != "auto":
        kinds = load().ComputeCapability
        chosen = [kinds.CURRENT] if asked == "current" else [getattr(kinds, f"SM{each}") for each in _listed(asked)]
        config.num_compute_capabilities = len(chosen)
        for index, kind in enumerate(chosen):
            if not config.set_compute_capability(kind, index):
                raise BuildError(
                    f"TensorRT for RTX {load().__version__} does not build for {kind.name}; choose another."
                )
    return lambda: None


def build(builder: "trt.Builder", network: "trt.INetworkDefinition", config: "trt.IBuilderConfig", plan: Path) -> bool:
    """Build a plan and write it to a file piece by piece, so that it is never whole in memory; returns whether there is
    one. Raises BuildError where it cannot be written."""
    from kvforge.tensorrt.rtx_stream import FileWriter

    built = False
    try:
        with plan.open("wb") as file, contextlib.closing(DirectFile(file)) as direct:
            writer = FileWriter(direct)
            built = bool(builder.build_serialized_network_to_stream(network, config, writer))
        if writer.error is not None:
            raise writer.error
    except OSError as error:
        built = False
        raise BuildError(f"{plan} cannot be written ({error.strerror}); make room for it.") from error
    finally:
        if not built:
            plan.unlink(missing_ok=True)
    return built
