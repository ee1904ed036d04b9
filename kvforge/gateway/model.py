"""What the gateway knows of the served model: its tokenizer, chat template, limits and names."""

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.chat_template import ChatTemplate
from kvforge.engine import MANIFEST_FILE, TOKENIZER_DIR, Manifest, load_manifest
from kvforge.errors import KvforgeError
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.tokenizer import Tokenizer
from kvforge.tokenizer_files import read_tokenizer_config, special_tokens

_PAGES = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"}'


@dataclass
class ServedModel:
    """Read once at the start; only `num_pages`, the size of the running engine's KV cache, is filled in later."""

    name: str
    created: int
    manifest: Manifest
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    chat_template: ChatTemplate | None
    max_seq_len: int
    num_pages: int | None = None

    @classmethod
    def load(cls, options: GatewayOptions) -> "ServedModel":
        """Raises KvforgeError when the directory is no engine, has no tokenizer, or the template cannot be read."""
        manifest = load_manifest(options.engine)
        directory = options.engine / TOKENIZER_DIR
        tokenizer = Tokenizer.from_dir(directory)
        if tokenizer is None:
            raise KvforgeError(
                f"{options.engine} has no tokenizer, so it cannot serve text; build it from a checkpoint that has one."
            )
        file = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        return cls(
            name=options.model_name or options.engine.resolve().name,
            created=int((options.engine / MANIFEST_FILE).stat().st_mtime),
            manifest=manifest,
            tokenizer=tokenizer,
            token_bytes=TokenBytes(tokenizer, file.get("decoder")),
            chat_template=_template(options.chat_template, directory),
            max_seq_len=min(manifest.max_seq_len, options.max_seq_len or manifest.max_seq_len),
        )

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the limits and the KV cache allow."""
        if self.num_pages is None:
            return self.max_seq_len
        return min(self.max_seq_len, self.num_pages * self.manifest.page_size + 1)

    @property
    def card(self) -> dict[str, Any]:
        """The entry of /v1/models; max_model_len as vLLM gives it."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "kvforge",
                "root": self.name, "parent": None, "max_model_len": self.max_seq_len}  # fmt: skip

    def read_num_pages(self, metrics_url: str) -> None:
        """Fill in `num_pages` from Triton's metrics; where they cannot be read, it stays unknown. Blocks."""
        try:
            with urllib.request.urlopen(metrics_url, timeout=5.0) as response:
                text = response.read().decode()
        except (OSError, ValueError):
            return
        for line in text.splitlines():
            if line.startswith(_PAGES):
                self.num_pages = int(float(line.rsplit(" ", 1)[1])) or None


def _template(file: Path | None, directory: Path) -> ChatTemplate | None:
    if file is None:
        return ChatTemplate.from_dir(directory)
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvforgeError(f"{file} cannot be read as a chat template ({error}); give a Jinja file.") from None
    return ChatTemplate(source, special_tokens(read_tokenizer_config(directory)))
