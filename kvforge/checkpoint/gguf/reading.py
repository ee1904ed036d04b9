"""A GGUF file as a checkpoint."""

from pathlib import Path

from kvforge.checkpoint.gguf.config import family_of_file, generation_config, hf_config
from kvforge.checkpoint.gguf.names import pieces_of
from kvforge.checkpoint.gguf.parts import read_parts
from kvforge.checkpoint.reader import Checkpoint
from kvforge.checkpoint.side_folder import SideFolder
from kvforge.common.errors import CheckpointError
from model_defs import ModelError, load_config


def open_gguf(path: Path) -> Checkpoint:
    """Open the GGUF file at ``path``, the first where a model has several. Its tensors go by the names of
    ``model_defs.weights``; its tokenizer and chat templates are written into a folder that goes with the checkpoint,
    when they are asked for.

    Raises:
        CheckpointError: the file cannot be read, or holds no model of a family that is read from GGUF files.
        MissingToolError: the package ``gguf`` is not there.
    """
    header = read_parts(path)
    family = family_of_file(header)
    hf, generation = hf_config(header, family), generation_config(header)
    try:
        config = load_config(hf, generation)
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from None
    pieces = pieces_of(header, family, config)

    def write(folder: Path) -> None:
        from kvforge.checkpoint.gguf.texts import write_texts  # here: compiling graphs alone needs no tokenizers

        write_texts(header, generation, folder, family.gguf.keeps_space_after if family.gguf is not None else None)

    files = {name: piece.stored.file for name, piece in pieces.items()}
    return Checkpoint(path, hf, generation, files, pieces=pieces, side_folder=SideFolder(write))
