"""Which words name a repository of the Hub, and which a path."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.checkpoint_files import is_gguf
from kvforge.common.errors import CheckpointError

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A repository as OWNER/NAME; ``revision`` is a branch, a tag or a commit, None the default branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_name(text: str | Path, revision: str | None = None) -> HubName | None:
    """Return what ``text`` names on the Hub, OWNER/NAME or OWNER/NAME@REVISION; None where it is a path: one that is
    there, or that of a GGUF file, or one that no repository can have.

    Raises:
        CheckpointError: ``revision`` is given for a path, or differs from the one in ``text``.
    """
    is_path = Path(text).exists() or is_gguf(Path(text))
    found = None if is_path else _NAME.fullmatch(str(text))
    if found is None:
        if revision is not None:
            raise CheckpointError(f"--revision is for names of the Hub, and {text} is a path; leave it out.")
        return None
    if revision is not None and found["revision"] not in (None, revision):
        raise CheckpointError(f"{text} names another revision than --revision {revision}; give one of them.")
    return HubName(found["repository"], revision or found["revision"])
