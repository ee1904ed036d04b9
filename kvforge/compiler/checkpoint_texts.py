"""What a build checks of the files beside a checkpoint's weights."""

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.side_files import check_side_files


def check_texts(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Check them, as ``check_side_files``, ``check_chat_template`` and ``check_tokens`` do.

    Raises:
        CheckpointError: one cannot be read, or asks for what is not supported.
    """
    # Here: compiling graphs alone (perf/gpu) needs no tokenizers.
    from kvforge.tokenization.chat_template import check_chat_template
    from kvforge.tokenization.files import check_tokens, read_tokenizer_config

    config = read_tokenizer_config(checkpoint.folder)
    check_side_files(checkpoint.folder, checkpoint.generation_config, config)
    check_chat_template(checkpoint.folder)
    if (checkpoint.folder / "tokenizer.json").is_file():
        check_tokens(checkpoint.folder, config, vocab_size)
