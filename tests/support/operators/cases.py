"""The random cases of every operator, and whether a backend's result is one that the reference allows."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import plugins
from plugins.registry import modules

_MODULES = dict(modules("cases"))
CASES: dict[str, Callable[..., tuple]] = {name: module.random_case for name, module in _MODULES.items()}


@functools.cache
def choices(name: str) -> frozenset[str]:
    """What a caller may choose of the operator's cases: `small`, and `dtypes` and others where it has them."""
    return frozenset(inspect.signature(CASES[name]).parameters) - {"seed"}


def case(name: str, seed: int, **chosen: Any) -> tuple:
    """The arguments of one call; what the operator's cases leave no choice of is ignored."""
    return CASES[name](seed, **{key: value for key, value in chosen.items() if key in choices(name)})


def written(name: str) -> list[int]:
    """The places among the operator's arguments of those that it writes."""
    operator = plugins.OPERATORS[name]
    return [i for i, argument in enumerate(operator.arguments) if argument.name in operator.writes]


def fresh(name: str, args: tuple) -> tuple:
    """The arguments with copies of what the operator writes, so that it leaves the case alone."""
    places = written(name)
    return tuple(x.clone() if isinstance(x, Tensor) and i in places else x for i, x in enumerate(args))


def results(name: str, args: tuple, result: Tensor | tuple[Tensor, ...] | None) -> list[Tensor]:
    """What a call gave: its results, then the arguments that it wrote."""
    given = [result] if isinstance(result, Tensor) else list(result or ())
    return given + [args[i] for i in written(name) if args[i] is not None]


def run(name: str, args: tuple, function: Callable[..., Any]) -> list[Tensor]:
    """What `function` gives for a case, which stays as it is."""
    args = fresh(name, args)
    return results(name, args, function(*args))


def reference(name: str, args: tuple) -> list[Tensor]:
    """The reference's results, then what it wrote."""
    return run(name, args, plugins.OPERATORS[name].reference)


def difference(name: str, args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """None when ``got`` is what the operator's judge allows, else what is wrong with it; ``fused``: the compiler may
    fuse multiply-adds, as on a GPU."""
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(one.shape)} {one.dtype} instead of {tuple(other.shape)} {other.dtype}"
    return _MODULES[name].difference(args, got, want, fused=fused)


def moved(args: tuple, device: torch.device) -> tuple:
    """Copies of the arguments on ``device``; strided views keep their strides."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_contiguous():
            return value.clone().to(device)
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copy.copy_(value)

    return tuple(move(value) for value in args)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_on(device: torch.device, name: str, seed: int, function: Callable[..., Any]) -> str | None:
    """Run one random case on ``device`` and return how it differs from the reference, or None."""
    args = case(name, seed, dtypes=FLOATS)
    ours = moved(args, device)
    got = [x.cpu() for x in results(name, ours, function(*ours))]
    return difference(name, args, got, reference(name, args), fused=True)
