"""The served model as Anthropic's clients list models."""

from datetime import datetime, timezone
from typing import Any

from kvforge.gateway.model import ServedModel


def model_info(model: ServedModel, name: str) -> dict[str, Any]:
    """The entry for one of the model's names; an answer and its prompt share the context."""
    created = datetime.fromtimestamp(model.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created,
            "lifecycle": "active", "max_input_tokens": model.max_seq_len, "max_tokens": model.max_seq_len}  # fmt: skip


def models_page(model: ServedModel) -> dict[str, Any]:
    """All names on one page."""
    entries = [model_info(model, name) for name in model.names]
    return {"data": entries, "has_more": False, "first_id": model.names[0], "last_id": model.names[-1]}
