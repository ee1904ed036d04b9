"""The operators of kvforge, one folder each, all backends of an operator side by side.

`OPERATORS` is the table of them, found by folder; `plugins.<name>` is each operator's public function, and
`load_library` makes the compiled CPU kernels available. Folders named in $KVFORGE_PLUGIN_PATH (as in $PATH) hold more
operators, which are as good as those here.
"""

import sys

from plugins.errors import PluginBuildError, PluginError, PluginLoadError
from plugins.library import has_kernels_for, load_library
from plugins.operator import Operator
from plugins.registry import OPERATORS

globals().update({name: getattr(sys.modules[f"plugins.{name}"], name) for name in OPERATORS})

__all__ = [
    "OPERATORS",
    "Operator",
    "PluginBuildError",
    "PluginError",
    "PluginLoadError",
    "has_kernels_for",
    "load_library",
]
