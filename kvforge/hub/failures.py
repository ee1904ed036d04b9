"""What huggingface_hub raises, as one sentence that says what to do."""

import contextlib
from collections.abc import Iterator

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvforge.common.errors import CheckpointError, first_line
from kvforge.hub.names import HubName


@contextlib.contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Within the block all that huggingface_hub raises about ``name`` becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of the HTTP client, which one it is depends on huggingface_hub's version
        raise CheckpointError(_sentence(name, error)) from error


def _sentence(name: HubName, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"{name.repository} is gated: ask for access on its page and log in with `hf auth login`, or set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision or constants.DEFAULT_REVISION}; give one that it has."
    if isinstance(error, HFValidationError):
        return f"{name} is neither a path here nor a name that the Hub allows ({first_line(error)})."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{name.repository} is neither a path here nor a repository that the Hub shows you; correct the name, or, "
            "if it is private, log in with `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        if constants.HF_HUB_OFFLINE:
            return (
                f"{name} is not a path here, and not all of it is in {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is "
                "set; unset that, or give a directory."
            )
        return (
            f"{name} is not a path here, and the Hub cannot be reached to download it; check the network, or give a "
            "directory."
        )
    if isinstance(error, HfHubHTTPError) and not isinstance(error, EntryNotFoundError):
        return f"The Hub refused {name} ({first_line(error)}); try again later, or give a directory."
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return (
            f"{name} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror}); free space there, or set HF_HOME "
            "to another place."
        )
    return f"{name} was not downloaded whole ({first_line(error)}); run the command again, which goes on from there."
