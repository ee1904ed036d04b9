"""Policies by name, and the text that names one with its parameters."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from types import ModuleType

from kvforge.common.errors import BuildError
from kvforge.kv_policies.policy import KVPolicy

ENTRY_POINTS = "kvforge.kv_policies"
"""The group of entry points by which other packages add policies."""

POLICIES: dict[str, type[KVPolicy]] = {}
"""Every policy by name: those of this package in alphabetical order, then those of entry points."""


def register(policy: type[KVPolicy]) -> type[KVPolicy]:
    """Add a policy, whose name must be new; returns it, so that this decorates a class too."""
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ValueError(f"there is a KV policy {policy.name!r} already")
    return policy


def load(name: str, parameters: Mapping[str, int] | None = None) -> KVPolicy:
    """Return the policy ``name``, with its defaults for what ``parameters`` leaves out.

    Raises:
        BuildError: no such policy or parameter, or a value out of range.
    """
    if name not in POLICIES:
        raise BuildError(f"the KV policy {name!r} is unknown; choose from {', '.join(POLICIES)}.")
    given = dict(parameters or {})
    known = list(POLICIES[name]().parameters)
    if unknown := [parameter for parameter in given if parameter not in known]:
        has = f"has {', '.join(known)}" if known else "has none"
        raise BuildError(f"the KV policy {name} has no parameter {unknown[0]!r}; it {has}.")
    return POLICIES[name](**given)


def parse(text: str) -> KVPolicy:
    """Return the policy that ``text`` names: ``NAME`` or ``NAME:PARAMETER=N,PARAMETER=N``.

    Raises:
        BuildError: not of this form, a parameter given twice, or as in :func:`load`.
    """
    name, colon, rest = text.partition(":")
    parameters: dict[str, int] = {}
    for item in rest.split(",") if colon else ():
        parameter, equals, value = item.partition("=")
        if not equals or not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise BuildError(
                f"the KV policy {text!r} is not a name and whole numbers; write NAME:PARAMETER=N,PARAMETER=N, such as "
                f"{next(str(policy()) for policy in POLICIES.values() if policy().parameters)}."
            )
        if parameter in parameters:
            raise BuildError(f"the KV policy {text!r} gives {parameter!r} twice; keep one of them.")
        parameters[parameter] = int(value)
    return load(name, parameters)


def _discover() -> Iterator[type[KVPolicy]]:
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name != __name__:
            yield from _defined_in(importlib.import_module(module.name))
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        yield entry.load()


def _defined_in(module: ModuleType) -> Iterator[type[KVPolicy]]:
    """A policy's class is in the file or the folder that is named after it."""
    for value in vars(module).values():
        is_policy = isinstance(value, type) and issubclass(value, KVPolicy) and value is not KVPolicy
        if is_policy and value.__module__.startswith(module.__name__):
            yield value


for _policy in _discover():
    register(_policy)
