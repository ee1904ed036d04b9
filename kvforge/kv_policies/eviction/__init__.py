"""Eviction: caches that keep a budget of tokens. Every file in ``rules/`` is a rule, and a KV policy of its name; those
in ``budgets/`` may go around a rule."""

import importlib
import pkgutil

from kvforge.kv_policies.eviction import budgets, rules
from kvforge.kv_policies.eviction.policy import Eviction as _Eviction

for _folder in (budgets, rules):
    for _module in pkgutil.iter_modules(_folder.__path__, f"{_folder.__name__}."):
        for _value in list(vars(importlib.import_module(_module.name)).values()):
            if isinstance(_value, type) and issubclass(_value, _Eviction) and _value.__module__ == _module.name:
                globals()[_value.__name__] = _value
