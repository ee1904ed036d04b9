"""Errors of the operator library: each message is one sentence that says what to do."""


class PluginError(RuntimeError):
    """Base of the errors raised by `plugins` itself (an operator's own checks raise RuntimeError)."""


class PluginBuildError(PluginError):
    """The C++ kernels cannot be compiled on this machine."""


class PluginLoadError(PluginError):
    """A compiled operator library cannot be used in this process."""
