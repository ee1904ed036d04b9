"""The one error of this package."""


class ModelError(ValueError):
    """A configuration or checkpoint that no definition here can serve; one sentence, saying what to do."""


def no_swiftkv_form(model_type: str) -> ModelError:
    """Return the error of a cut in a model of a family that has none, or no other than its own."""
    return ModelError(f"{model_type} models have no SwiftKV form; give the checkpoint as it was published.")
