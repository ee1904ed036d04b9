"""Every float tolerance of the tests says where it comes from.

A number that was fitted on one machine fails on another: a CPU with other matrix instructions sums in another order. So
a tolerance is zero, or one of the bounds of tests/support/rounding.py, or a constant of its module with a docstring
that gives the reason. pytest.approx as it stands, a millionth, is for Python's doubles: it is 10^10 of their roundings.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
TOLERANCES = {
    "assert_close": {"atol", "rtol"},
    "allclose": {"atol", "rtol"},
    "isclose": {"atol", "rtol"},
    "assert_allclose": {"atol", "rtol"},
    "approx": set(),
}
"""The comparisons, and which tolerances each must be given: what torch and NumPy assume knows nothing of the sums."""
THRESHOLD = 0.1
"""A comparison with a smaller number is one of errors, not of rates or times."""


def floats(node: ast.AST) -> list[float]:
    """The float literals of an expression, but for those that it passes to functions other than a choice of numbers."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, float) else []
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") not in ("min", "max", "float"):
        return []
    return [value for child in ast.iter_child_nodes(node) for value in floats(child)]


def is_bare(node: ast.expr) -> bool:
    """Whether a tolerance is a number other than zero, or is made of one: 2 * BOUND has a name, 1e-4 * largest a number
    that nobody explained."""
    is_named = any(isinstance(part, ast.Name) for part in ast.walk(node))
    return bool(floats(node)) or (not is_named and ast.unparse(node) != "0")


def tolerances(call: ast.Call) -> dict[str, ast.expr]:
    """The tolerances that a call of a comparison passes, by name."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in TOLERANCES or (isinstance(call.func, ast.Attribute) and ast.unparse(call.func).startswith("math.")):
        return {}
    missing: dict[str, ast.expr] = {key: ast.Constant(1.0) for key in TOLERANCES[name]}
    positional = zip(("rel", "abs"), call.args[1:], strict=False) if name == "approx" else ()
    return (
        missing | dict(positional) | {k.arg: k.value for k in call.keywords if k.arg in ("atol", "rtol", "rel", "abs")}
    )


def limits(node: ast.Compare) -> Iterator[ast.expr]:
    """The upper limits of a comparison; what is compared with a random number is a probability."""
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        small, large = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and "rand" not in ast.unparse(small):
            yield large


def documented(module: ast.Module) -> dict[str, bool]:
    """Whether each name that the module binds to floats, at any depth, is a constant with a docstring."""
    found: dict[str, bool] = {}
    for node in ast.walk(module):
        for body in (getattr(node, field, None) for field in ("body", "orelse")):
            for at, statement in enumerate(body if isinstance(body, list) else ()):
                if not isinstance(statement, ast.Assign) or not floats(statement.value):
                    continue
                after = body[at + 1] if at + 1 < len(body) else None
                reason = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = found.get(target.id, True) and node is module and reason
    return found


def unexplained(source: str) -> list[str]:
    """``line: expression`` of every tolerance of a module that has no reason."""
    module = ast.parse(source)
    reasons = documented(module)

    def is_explained(node: ast.expr) -> bool:
        return all(reasons.get(part.id, True) for part in ast.walk(node) if isinstance(part, ast.Name))

    found: list[ast.expr] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            found += [value for value in tolerances(node).values() if is_bare(value) or not is_explained(value)]
        elif isinstance(node, ast.Compare):
            for limit in limits(node):
                is_tolerance = any(isinstance(x, ast.Name) and "tolerance" in x.id.lower() for x in ast.walk(limit))
                is_small = any(0 < value < THRESHOLD for value in floats(limit))
                found += [limit] if is_small or (is_tolerance and not is_explained(limit)) else []
    return [f"{getattr(node, 'lineno', 'defaults')}: {ast.unparse(node)}" for node in found]


def test_every_tolerance_has_a_reason() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 300
    found = [f"{path.relative_to(TESTS)}:{line}" for path in files for line in unexplained(path.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "assert_close(a, b, atol=1e-5, rtol=0)",
        "torch.allclose(a, b)",
        "torch.allclose(a, b, atol=0)",
        "torch.allclose(a, b, rtol=0, atol=1e-4 * float(b.max()))",
        "assert x == approx(y, 1e-3)",
        "assert x == approx(y, abs=1)",
        "assert x == approx(y, rel=min(1e-3, z))",
        "assert (a - b).abs().max() < 2e-6",
        "assert 1e-5 >= (a - b).abs().max()",
        "BOUND = 1e-4\nassert x == approx(y, rel=2 * BOUND)",
        "def f():\n    tolerance = 1e-4 if x else 1e-2\n    'fitted'\n    assert x < tolerance",
    ],
)
def test_a_number_without_a_reason_is_found(line: str) -> None:
    assert unexplained(line)


@pytest.mark.parametrize(
    "line",
    [
        "assert_close(a, b, atol=0, rtol=0)",
        "torch.allclose(a, b, rtol=0, atol=2 * sum_error(64))",
        "assert x == approx(y)",
        "BOUND = 1e-4\n'Half a unit of the last digit.'\nassert x == approx(y, rel=2 * BOUND)",
        "if rng.random() < 0.05: pass",
        "assert seconds < 0.5 and kl > 1e-3",
        "math.isclose(a, b)",
    ],
)
def test_a_reason_is_enough(line: str) -> None:
    assert not unexplained(line)
