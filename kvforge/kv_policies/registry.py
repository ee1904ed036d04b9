"""Policies by name, and the text that names one with its parameters."""

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from inspect import isabstract
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

from kvforge.common.errors import BuildError, first_line
from kvforge.common.number_formats import KV_FORMATS
from kvforge.common.suggestions import did_you_mean
from kvforge.kv_policies.capabilities import Wrapping
from kvforge.kv_policies.policy import KVPolicy, Need
from kvforge.kv_policies.sealing.policy import SealedPages

ENTRY_POINTS = "kvforge.kv_policies"
"""The group of entry points by which other packages add policies."""

_NAME = re.compile("[a-z][a-z0-9_]*")


def policies() -> dict[str, type[KVPolicy]]:
    """Return every policy by name: those of this package in alphabetical order, then those of entry points.

    They are looked for at the first call, not at import: a policy's file imports this package.
    """
    return _found()[0]


def defaults() -> list[KVPolicy]:
    """Return every policy with its default parameters."""
    return [kind() for kind in policies().values()]


def broken_policies() -> dict[str, str]:
    """Return, by the names of their entry points, why policies of other packages could not be loaded."""
    return _found()[1]


def load(name: str, parameters: Mapping[str, int] | None = None) -> KVPolicy:
    """Return the policy ``name``, with its defaults for what ``parameters`` leaves out.

    Raises:
        BuildError: no such policy or parameter, or a value out of range.
    """
    policy = _named(name)
    given = dict(parameters or {})
    known = list(policy().parameters)
    if unknown := [parameter for parameter in given if parameter not in known]:
        has = f"has {', '.join(known)}" if known else "has none"
        raise BuildError(f"the KV policy {name} has no parameter {unknown[0]!r}; it {has}.")
    return policy(**given)


def parse(text: str) -> KVPolicy:
    """Return the policy that ``text`` names: ``NAME`` or ``NAME:PARAMETER=N,PARAMETER=N``, where ``NAME`` may be
    ``NAME+VARIANT``.

    Raises:
        BuildError: not of this form, a parameter given twice, or as in :func:`load`.
    """
    name, colon, rest = text.partition(":")
    policy = _named(name)
    parameters: dict[str, int] = {}
    for item in rest.split(",") if colon else ():
        parameter, equals, value = item.partition("=")
        if not equals or not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise BuildError(
                f"the KV policy {text!r} is not a name and whole numbers; write NAME or NAME:PARAMETER=N,PARAMETER=N, "
                f"such as {policy()}."
            )
        if parameter in parameters:
            raise BuildError(f"the KV policy {text!r} gives {parameter!r} twice; keep one of them.")
        parameters[parameter] = int(value)
    return load(name, parameters)


def of_cache(policy: KVPolicy, kv_dtype: str) -> KVPolicy:
    """Return what ``policy`` is on a cache of ``kv_dtype``, a key of ``KV_FORMATS``.

    Raises:
        BuildError: it is not ``full``, and the cache has groups.
    """
    if not KV_FORMATS[kv_dtype].is_grouped:
        return policy
    if Need.OWN_CACHE in policy.needs:
        raise BuildError(f"--kv-dtype {kv_dtype} goes with --kv-policy full alone, not {policy.name}; leave one out.")
    return SealedPages()


def operators() -> frozenset[str]:
    """Return what the insertions of all policies call, on caches of any format."""
    return frozenset(name for one in (*defaults(), SealedPages()) for name in one.insertion.operators)


def _named(name: str) -> Callable[..., KVPolicy]:
    """Return what makes the policy ``name`` of its parameters."""
    base, plus, variant = name.partition("+")
    if base not in policies():
        if base in broken_policies():
            raise BuildError(f"the KV policy {base} cannot be loaded: {broken_policies()[base]}.")
        hint = did_you_mean(base, policies()) or "."
        raise BuildError(f"the KV policy {base!r} is unknown; choose from {', '.join(policies())}{hint}")
    policy = policies()[base]
    if not plus:
        return policy
    possible = wrappers_of(base)
    if variant not in possible:
        choice = f"choose from {', '.join(possible)}" if possible else _others_with(variant)
        raise BuildError(f"the KV policy {base} cannot be combined with {variant!r}; {choice}.")
    return functools.partial(cast(Callable[..., KVPolicy], possible[variant]), policy)


def wrappers_of(name: str) -> dict[str, type[Wrapping]]:
    """Return by name, in alphabetical order, what may go around the policy ``name``."""
    return {wrapper: kind for wrapper, kind in _wrappers().items() if kind.can_wrap(policies()[name])}


def _others_with(variant: str) -> str:
    """Return what to do about a policy that nothing goes around, in the imperative."""
    others = [name for name in policies() if variant in wrappers_of(name)]
    return "leave the rest out" + (f", or combine it with one of {', '.join(others)}" if others else "")


@functools.cache
def _found() -> tuple[dict[str, type[KVPolicy]], dict[str, str]]:
    """What other packages bring may be broken: that concerns those alone who ask for it."""
    found: dict[str, type[KVPolicy]] = {}
    broken: dict[str, str] = {}
    for policy in sorted((kind for kind in _own() if isinstance(kind.name, str)), key=attrgetter("name")):
        _add(found, policy)
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            _add(found, entry.load())
        except BaseException as error:  # a module may even try to end the process
            if isinstance(error, KeyboardInterrupt):
                raise
            broken[entry.name] = f"{entry.value}: {first_line(error)}"
    return found, broken


@functools.cache
def _wrappers() -> dict[str, type[Wrapping]]:
    """Policies of this package without a name of their own, by what follows another one's."""
    kinds = (
        kind for kind in _own() if issubclass(kind, Wrapping) and not (isinstance(kind.name, str) or isabstract(kind))
    )
    return {kind.wrapper_name: kind for kind in sorted(kinds, key=attrgetter("wrapper_name"))}


def _add(found: dict[str, type[KVPolicy]], policy: object) -> None:
    if not (isinstance(policy, type) and issubclass(policy, KVPolicy)):
        raise TypeError("this is no subclass of KVPolicy")
    if missing := sorted(cast(frozenset[str], policy.__abstractmethods__)):
        raise TypeError(f"{policy.__name__} does not define {', '.join(missing)}")
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{policy.__name__}.name is {name!r}; give lower-case letters, digits and underscores")
    made = policy()  # every parameter has a default
    for attribute, (is_one, kind) in _ATTRIBUTES.items():
        if not is_one(value := attrgetter(attribute)(made)):
            raise TypeError(f"{policy.__name__}.{attribute.rpartition('.')[2]} is {value!r}; give {kind}")
    if found.get(name, policy) is not policy:
        raise ValueError(f"there is a KV policy {name!r} already")
    found[name] = policy


def _are_texts(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)


_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "title": (lambda value: isinstance(value, str), "a text"),
    "needs": (
        lambda value: isinstance(value, frozenset) and all(isinstance(need, Need) for need in value),
        "a frozenset of Need",
    ),
    "insertion.operators": (_are_texts, "a tuple of names"),
    "keeping.slot_columns": (_are_texts, "a tuple of names"),
    "keeping.counters": (
        lambda value: isinstance(value, Mapping) and _are_texts((*value, *value.values())),
        "names with texts",
    ),
}
"""What others read of every policy, whichever an engine has."""


def _own() -> Iterator[type[KVPolicy]]:
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        yield from _defined_in(importlib.import_module(module.name))


def _defined_in(module: ModuleType) -> Iterator[type[KVPolicy]]:
    """A policy's class is in the file or the folder that is named after it, or in a folder of its kin."""
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        is_policy = isinstance(value, type) and issubclass(value, KVPolicy) and value is not KVPolicy
        if is_policy and value.__module__.startswith(module.__name__):
            yield value
