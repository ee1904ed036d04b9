"""Which flavour of TensorRT this environment has, found without importing it."""

import importlib
import importlib.util
import sys
from typing import cast

from kvforge.common.errors import MissingToolError
from kvforge.common.extras import how_to_install
from kvforge.tensorrt.flavour import Flavour

RTX = "tensorrt-rtx"

MODULES = {"tensorrt": ("tensorrt",), RTX: ("tensorrt_rtx_bindings", "tensorrt_rtx_libs")}
"""The Python modules that each flavour is made of, by the extra that brings it; the first that is whole is used."""
TITLES = {"tensorrt": "TensorRT", RTX: "TensorRT for RTX"}
DISTRIBUTIONS = {"tensorrt": "tensorrt", RTX: "tensorrt-rtx-cu13-bindings"}
"""The packages whose version is the flavour's."""
_IMPLEMENTED_BY = {"tensorrt": "kvforge.tensorrt.tensorrt11", RTX: "kvforge.tensorrt.rtx"}


def installed_flavour() -> str | None:
    """Return the name of the flavour that is used here, a key of ``TITLES``, or None."""
    for name, modules in MODULES.items():
        if all(map(_is_there, modules)):
            return name
    return None


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def flavour() -> Flavour:
    """Return the module of the flavour that is used here; raises MissingToolError where there is none."""
    name = installed_flavour()
    if name is None:
        raise MissingToolError(
            f"There is no TensorRT; install TensorRT for RTX with {how_to_install(RTX)}, or on a machine "
            f"with an NVIDIA GPU TensorRT 11 with {how_to_install('tensorrt')}."
        )
    return cast(Flavour, importlib.import_module(_IMPLEMENTED_BY[name]))
