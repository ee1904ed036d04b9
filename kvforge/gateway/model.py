"""What the gateway knows of the served model: its tokenizer, chat template, limits and names."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.sampling_fields import DEFAULT_FIELDS
from kvforge.gateway.errors import ApiError
from kvforge.gateway.languages.marked_text import TOKEN
from kvforge.gateway.languages.reasoning_format import ReasoningFormat
from kvforge.gateway.languages.reasoning_formats import reasoning_formats, recognised_reasoning
from kvforge.gateway.languages.tool_format import ToolFormat
from kvforge.gateway.languages.tool_formats import formats, recognised
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.token_bytes import TokenBytes
from kvforge.manifest import MANIFEST_FILE, TOKENIZER_DIR, Manifest, load_manifest
from kvforge.runtime.requests.defaults import SamplingDefaults
from kvforge.runtime.text.limits import TextLimits
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tokenization.chat_template import ChatTemplate, read_template
from kvforge.tokenization.files import read_tokenizer_config, special_tokens

NO_REASONING = "none"
"""The name of the format of models whose reasoning stays in the text."""


@dataclass(frozen=True)
class ServedModel:
    """Read once at the start. `max_seq_len` tokens always fit the KV cache: the engine does not load otherwise."""

    name: str
    names: tuple[str, ...]
    """By any of which clients may call it, the first being ``name``."""
    created: int
    manifest: Manifest
    tokenizer: Tokenizer
    text_limits: TextLimits
    token_bytes: TokenBytes
    chat_template: ChatTemplate | None
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    marks: dict[int, str]
    """The formats' markers that are tokens, which no other tokens may write: by id, as call_reader sees them."""
    shown_marks: frozenset[int]
    """Those of them that are in a client's text, too: they are no special tokens."""
    max_seq_len: int
    sampling: SamplingDefaults
    """Of requests that do not say."""
    digest: str
    """Of all files that it was read from: the same for those who read requests for this process."""

    @classmethod
    def load(cls, options: GatewayOptions) -> "ServedModel":
        """Raises KvforgeError when the directory is no engine, has no tokenizer, the template or the model's sampling
        cannot be read, or there is no such format of tool calls or reasoning."""
        manifest = load_manifest(options.engine, options.manifest_sha256)
        directory = options.engine / TOKENIZER_DIR
        tokenizer = Tokenizer.from_dir(directory)
        if tokenizer is None:
            raise KvforgeError(
                f"{options.engine} has no tokenizer, so it cannot serve text; build it from a checkpoint that has one."
            )
        data = (directory / "tokenizer.json").read_bytes()
        template = _template(options.chat_template, directory)
        tool_format = _tool_format(options.tool_call_format, template)
        reasoning_format = _reasoning_format(options.reasoning_format, template)
        markers = [marker for entry in (tool_format, reasoning_format) if entry is not None for marker in entry.markers]
        added, marks = tokenizer.backend.get_added_tokens_decoder(), _marks(tokenizer, markers)
        sampling = sampling_defaults(options)
        digest = hashlib.sha256((options.engine / MANIFEST_FILE).read_bytes() + data)
        digest.update(json.dumps(sampling.values, sort_keys=True).encode())
        if template is not None:
            digest.update(json.dumps([template.sources, template.special_tokens], sort_keys=True).encode())
        max_seq_len = min(manifest.max_seq_len, options.max_seq_len or manifest.max_seq_len)
        return cls(
            name=options.names[0],
            names=options.names,
            created=int((options.engine / MANIFEST_FILE).stat().st_mtime),
            manifest=manifest,
            tokenizer=tokenizer,
            text_limits=TextLimits.of(tokenizer, max_seq_len),
            token_bytes=TokenBytes(tokenizer, json.loads(data).get("decoder")),
            chat_template=template,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            marks=marks,
            shown_marks=frozenset(index for index in marks if not added[index].special),
            max_seq_len=max_seq_len,
            sampling=sampling,
            digest=digest.hexdigest(),
        )

    def check_name(self, name: str) -> None:
        """Raise ApiError (404) where a client means another model."""
        if name not in self.names:
            message = f"the model '{name[:80]}' does not exist; this server has {', '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")

    def marker_tokens(self, markers: Collection[str]) -> dict[str, int]:
        """Those of a format's markers that are tokens, and which."""
        ids = {mark.removeprefix(TOKEN): index for index, mark in self.marks.items()}
        return {marker: ids[marker] for marker in markers if marker in ids}

    def marker_token(self, text: str) -> int | None:
        """The one token that a marker is, which a guide does not let other tokens write; None for plain text."""
        return next((token for token, mark in self.marks.items() if mark == TOKEN + text), None)

    def card(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models for one of the names; max_model_len and what samples requests that do not say are in
        vLLM's words."""
        return {"id": name, "object": "model", "created": self.created, "owned_by": "kvforge",
                "root": self.name, "parent": None, "max_model_len": self.max_seq_len,
                "default_sampling_params": self.sampling.values}  # fmt: skip


def sampling_defaults(options: GatewayOptions) -> SamplingDefaults:
    """What holds where a request does not say. Raises KvforgeError where it cannot be used."""
    chosen = {name: getattr(options, name) for name in DEFAULT_FIELDS}
    return SamplingDefaults.read(options.engine / TOKENIZER_DIR, options.generation_config, chosen)


def _tool_format(name: str | None, template: ChatTemplate | None) -> ToolFormat | None:
    if name is None:
        return None if template is None else recognised(template.source_with_tools)
    known = formats()
    if name not in known:
        raise KvforgeError(f"--tool-call-format {name} is not known; give one of {', '.join(sorted(known))}.")
    return known[name]


def _reasoning_format(name: str | None, template: ChatTemplate | None) -> ReasoningFormat | None:
    if name is None:
        return None if template is None else recognised_reasoning("\n".join(template.sources.values()))
    known = reasoning_formats()
    if name != NO_REASONING and name not in known:
        raise KvforgeError(
            f"--reasoning-format {name} is not known; give one of {', '.join(sorted(known))}, or {NO_REASONING}."
        )
    return known.get(name)


def _marks(tokenizer: Tokenizer, markers: Collection[str]) -> dict[int, str]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        index: TOKEN + token.content
        for index, token in added.items()
        if token.content in markers and (token.special or (token.content[0] == "<" and token.content[-1] == ">"))
    }


def _template(file: Path | None, directory: Path) -> ChatTemplate | None:
    if file is None:
        return ChatTemplate.from_dir(directory)
    return ChatTemplate(read_template(file), special_tokens(read_tokenizer_config(directory)))
