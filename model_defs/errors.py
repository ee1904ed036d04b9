"""The one error of this package."""


class ModelError(ValueError):
    """A configuration or checkpoint that no definition here can serve; one sentence, saying what to do."""
