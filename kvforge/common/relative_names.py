"""Names of files as other files give them."""

from pathlib import PurePath


def is_inside(name: str) -> bool:
    """Whether ``name`` is a relative path that stays in the directory it is joined to, symbolic links aside."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
