"""An engine directory with everything but an engine: manifest, tokenizer, chat template."""

from pathlib import Path

from kvforge.manifest import SCHEMA_VERSION, TOKENIZER_DIR, Manifest, save_manifest
from tests.support.models.checkpoints import write_byte_tokenizer

TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_engine_files(path: Path, max_seq_len: int = 4096) -> Path:
    """Write `path` with the tests' byte tokenizer: token ids 3 to 258 are bytes, 1 and 2 begin and end a text."""
    (path / TOKENIZER_DIR).mkdir(parents=True)
    write_byte_tokenizer(path / TOKENIZER_DIR)
    (path / TOKENIZER_DIR / "chat_template.jinja").write_text(TEMPLATE)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION, kvforge_version="0", target="cpu", isa=("x86_64",), torch_version="2",
        dtype="float32", weight_dtype="float32", kv_dtype="float32", kv_scales=(), model_type="llama", num_layers=1,
        hidden_size=16, intermediate_size=16,
        num_heads=1, num_kv_heads=1, head_dim=16, vocab_size=320, max_position=max_seq_len, layer_windows=(0,), cut=1,
        owner_of_layer=(0,), early_exit=False, page_size=16, max_num_seqs=8, max_num_tokens=64, max_seq_len=max_seq_len,
        max_draft_len=0, bos_token_id=1, eos_token_ids=(2,), num_parameters=1, weights_file_bytes=0,
        checkpoint_sha256="0" * 64, operators={}, files={},
    )  # fmt: skip
    save_manifest(manifest, path)
    return path
