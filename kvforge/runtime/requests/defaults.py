"""How tokens are chosen where a request does not say: as the model asks, or as was chosen for all requests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError, RequestError, first_line
from kvforge.common.sampling_fields import AUTO, DEFAULT_FIELDS, GENERATION_CONFIGS, NONE, SAMPLING_FIELDS
from kvforge.runtime.requests.params import SamplingParams

NEUTRAL = {name: SAMPLING_FIELDS[name].neutral for name in DEFAULT_FIELDS}
FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """Later ones go before earlier ones: ``neutral``, ``model`` (generation_config.json), ``chosen`` (command line)."""

    model: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=NEUTRAL.copy)

    @classmethod
    def read(
        cls, directory: Path | None, generation_config: str = AUTO, chosen: Mapping[str, Any] | None = None
    ) -> "SamplingDefaults":
        """Those of an engine whose tokenizer's files are in ``directory``; ``chosen`` may hold None.

        Raises:
            KvforgeError: generation_config.json cannot be read, or asks for what SamplingParams does not take.
            RequestError: that is so of ``chosen``, or ``generation_config`` is none of GENERATION_CONFIGS.
        """
        if generation_config not in GENERATION_CONFIGS:
            raise RequestError(
                f"generation_config is {generation_config!r}", f"give one of {', '.join(GENERATION_CONFIGS)}"
            )
        given = {name: value for name, value in (chosen or {}).items() if value is not None}
        SamplingParams(**given)
        return cls({} if directory is None or generation_config == NONE else _model(directory / FILE), given)

    @property
    def values(self) -> dict[str, Any]:
        """Those that hold, by the names of DEFAULT_FIELDS."""
        return {**self.neutral, **self.model, **self.chosen}

    @property
    def params(self) -> SamplingParams:
        """Those of a request that says nothing at all."""
        return SamplingParams(**self.values)

    def greedy_at_first(self) -> "SamplingDefaults":
        """The same for commands, which are greedy as long as neither the model nor the command line asks for a choice
        of tokens."""
        asks = {*self.model, *self.chosen} - {"repetition_penalty"}
        return self if asks else SamplingDefaults(self.model, self.chosen, {**self.neutral, "temperature": 0.0})

    def __str__(self) -> str:
        """What holds and where it is from."""
        values, parts = self.values, []
        model = [name for name in self.model if name not in self.chosen]
        neutral = [name for name in DEFAULT_FIELDS if name not in (*self.model, *self.chosen)]
        for names, source in ((model, FILE), (self.chosen, "command line"), (neutral, "neutral")):
            if names:
                parts.append(", ".join(f"{name} {values[name]:g}" for name in names) + f" ({source})")
        return ", ".join(parts)


def _model(file: Path) -> dict[str, Any]:
    """What a generation_config.json says; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise RequestError("it is no JSON object")
        found = {name: config[name] for name in DEFAULT_FIELDS if config.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, RecursionError, RequestError) as error:
        reason = first_line(error).rstrip(".")
        raise KvforgeError(
            f"{file} cannot be used ({reason}); correct it, or choose --generation-config none."
        ) from None
    return found
