"""An engine directory with everything but an engine: manifest, tokenizer, chat template."""

from pathlib import Path

from kvforge.manifest import TOKENIZER_DIR, save_manifest
from tests.support.models.checkpoints import write_byte_tokenizer
from tests.support.sessions.fake import fake_manifest

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
    manifest = fake_manifest(
        isa=("x86_64",), torch_version="2", model_type="llama", num_layers=1, hidden_size=16, intermediate_size=16,
        head_dim=16, vocab_size=320, max_position=max_seq_len, page_size=16, max_seq_len=max_seq_len, num_parameters=1,
        checkpoint_sha256="0" * 64,
    )  # fmt: skip
    save_manifest(manifest, path)
    return path
