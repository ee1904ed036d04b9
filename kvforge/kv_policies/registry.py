"""Policies by name, and the text that names one with its parameters."""

from collections.abc import Mapping

from kvforge.errors import BuildError
from kvforge.kv_policies.full import Full
from kvforge.kv_policies.policy import KVPolicy
from kvforge.kv_policies.shadowkv import ShadowKV

POLICIES: dict[str, type[KVPolicy]] = {policy.name: policy for policy in (Full, ShadowKV)}
"""Every policy; another is a class here with its needs declared."""


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
    """Return the policy that ``text`` names: ``full``, ``shadowkv`` or ``shadowkv:rank=64,sparse_budget=1024``.

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
                "shadowkv:rank=160,sparse_budget=2048."
            )
        if parameter in parameters:
            raise BuildError(f"the KV policy {text!r} gives {parameter!r} twice; keep one of them.")
        parameters[parameter] = int(value)
    return load(name, parameters)
