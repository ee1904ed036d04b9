"""Offline use of an engine, of a checkpoint or of a name on the Hub."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvforge import runtime
from kvforge.common.display import Display
from kvforge.common.errors import BuildError
from kvforge.engine_cache.names import check_is_there, names_checkpoint


class LLM(runtime.LLM):
    """An engine with texts: ``LLM("ENGINE").generate("Once upon", SamplingParams(max_tokens=20))``.

    ``model`` is an engine directory; or a checkpoint directory or OWNER/NAME[@REVISION] on the Hub, of which an engine
    is built once and kept in the cache. ``build_options`` are fields of ``BuildOptions`` for that, such as
    ``{"kv_dtype": "fp8"}``; ``quiet`` hides its progress. Takes the keyword arguments of ``LLMEngine``. One caller at a
    time.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        BuildError: no engine can be built of it so, or ``build_options`` are given for an engine.
        EngineError: the engine cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        build_options: Mapping[str, Any] | None = None,
        quiet: bool = False,
        **engine_options: Any,
    ) -> None:
        if model is not None and names_checkpoint(model, revision):
            from kvforge.compiler import BuildOptions
            from kvforge.engine_cache.build import cached_engine

            try:
                options = BuildOptions(**(build_options or {}))
            except TypeError as error:
                raise BuildError(f"build_options are fields of BuildOptions ({error}); correct them.") from None
            cached = cached_engine(model, options, revision=revision, display=Display(quiet=quiet))
            weakref.finalize(self, cached.release)
            model = cached.path
        else:
            if model is not None:
                check_is_there(model)
            if build_options:
                raise BuildError(f"build_options are for checkpoints, and {model} is none; leave them out.")
        super().__init__(model, **engine_options)
