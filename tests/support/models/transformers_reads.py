"""What transformers reads of a checkpoint's JSON files, by walking its own classes and their source."""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from transformers import modeling_rope_utils

_CONFIG_METHODS = ("__post_init__", "convert_rope_params_to_dict", "standardize_rope_params")
_LOOK_UPS = ("pop", "get", "setdefault")


def config_keys(config_class: type) -> set[str]:
    """Keys of ``config.json`` that a configuration class reads: its fields, other names of them, and what its methods
    take of further ones."""
    keys = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    keys |= {*config_class.attribute_map, *config_class.attribute_map.values()}  # type: ignore[attr-defined]
    for base in config_class.__mro__:
        if base.__module__.startswith("transformers"):
            for function in _functions(base, _CONFIG_METHODS):
                keys |= looked_up(function, "kwargs")
    return keys


def model_keys(model_class: type) -> set[str]:
    """Attributes of the text configuration that the classes of a model read, by their source."""
    config_class: Any = model_class.config_class  # type: ignore[attr-defined]
    beside = [each for each in vars(sys.modules[config_class.__module__]).values() if dataclasses.is_dataclass(each)]
    of_others = {field.name for each in beside for field in dataclasses.fields(each)}
    of_others |= {alias for each in beside for alias in each.attribute_map}
    of_text = {field.name for field in dataclasses.fields(config_class)}
    computed = {
        name for name in dir(config_class) if callable(getattr(config_class, name)) or _is_property(config_class, name)
    }
    found = set(_attributes_of_config(ast.parse(inspect.getsource(sys.modules[model_class.__module__]))))
    return found - (of_others - of_text) - (computed - of_text)


def rope_keys() -> set[str]:
    """Keys of ``rope_parameters`` that transformers reads."""
    tree, keys = ast.parse(inspect.getsource(modeling_rope_utils)), set[str | None]()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=owner, slice=key) if "rope_parameters" in ast.unparse(owner):
                keys.add(_text(key))
            case ast.Call(func=ast.Attribute(value=owner, attr=attr), args=[key, *_]) if attr in _LOOK_UPS:
                keys |= {_text(key)} if "rope_parameters" in ast.unparse(owner) else set()
    return {key for key in keys if key is not None}


def tokenizer_keys(*classes: type) -> set[str]:
    """Keys of ``tokenizer_config.json`` that tokenizers read as they are made."""
    keys: set[str] = set()
    for each in classes:
        for base in each.__mro__:
            if base.__module__.startswith("transformers"):
                for function in _functions(base, ("__init__", "_from_pretrained")):
                    keys |= looked_up(function, "kwargs", "init_kwargs")
                    is_made = function.name == "__init__"
                    keys |= {each.arg for each in function.args.args if is_made and each.arg != "self"}
        keys |= {*each.SPECIAL_TOKENS_ATTRIBUTES}  # type: ignore[attr-defined]
    return keys


def looked_up(function: ast.AST, *names: str) -> set[str]:
    """The constants by which a function looks something up in its dictionaries ``names``."""
    keys: set[str | None] = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr), args=[first, *_]):
                keys |= {_text(first)} if name in names and attr in _LOOK_UPS else set()
            case ast.Subscript(value=ast.Name(id=name), slice=key) if name in names:
                keys.add(_text(key))
            case ast.Compare(left=left, comparators=[ast.Name(id=name)]) if name in names:
                keys.add(_text(left))
    return {key for key in keys if key is not None}


def _functions(owner: type, names: tuple[str, ...]) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names)


def _attributes_of_config(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=attribute) if _is_config(value):
                yield attribute
            case ast.Call(func=ast.Name(id="getattr"), args=[value, key, *_]) if _is_config(value) and _text(key):
                yield str(_text(key))


def _is_property(owner: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(owner, name, None), property)


def _is_config(node: Any) -> bool:
    match node:
        case ast.Name(id="config") | ast.Attribute(attr="config"):
            return True
    return False


def _text(node: Any) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
