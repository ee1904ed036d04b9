"""Simplifying what torch writes as ONNX, in time that grows with the graph: torch's own ``optimize=True`` looks for
pairs of slices among all nodes at each node."""

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.common import (
    cast_cast_rule,
    materialize_reshape_shape_rule,
    no_op_cast_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
)

_RULES = (
    materialize_reshape_shape_rule,
    cast_cast_rule,
    no_op_cast_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
)
_ROUNDS = 2
"""A shape that became a constant in the first has folded what computed it in the second."""


def simplify(model: ir.Model) -> None:
    """Fold constants, give each value its type, write known shapes as constants, and merge equal nodes and initializers
    of ``model``."""
    common.InlinePass()(model)
    for _ in range(_ROUNDS):
        fold_constants(model, onnx_shape_inference=True)
        RewritePass(_RULES)(model)
        common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)
