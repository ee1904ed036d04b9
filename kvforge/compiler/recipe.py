"""Engine recipes: a YAML file that says what to build, from what, and what the model is expected to be."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import BuildError, first_line
from kvforge.common.number_formats import ALIASES, KV_FORMATS, WEIGHT_BYTES
from kvforge.compiler.options import LIMITS, BuildOptions
from kvforge.compiler.targets import HOSTED, TARGETS
from kvforge.kv_policies import parse
from model_defs import ModelConfig

_CHOICES = {
    "target": (*TARGETS, *HOSTED),
    "dtype": ("auto", *COMPUTE_DTYPES, *ALIASES),
    "weight_dtype": ("auto", *WEIGHT_BYTES, *ALIASES),
    "kv_dtype": ("auto", *KV_FORMATS, *ALIASES),
}
_LIMITS = {**LIMITS, "cut": (1, 2**31 - 1), "group_size": (1, 2**31 - 1)}
_PATHS = ("checkpoint", "output")
_NUMBERS = ("weight_bits",)
_FLAGS = ("early_exit", "decoupled_mode", "copy_checkpoint")
KEYS = (*_PATHS, "cut", "group_size", *(field.name for field in fields(BuildOptions)))
"""Every key of a recipe; all but ``checkpoint``, ``output``, ``cut`` and ``group_size`` are build options."""


@dataclass(frozen=True)
class Recipe:
    """A validated recipe. ``given`` holds the build options that the file names; ``cut`` and ``group_size`` are
    what the model must have, None where the file does not say."""

    path: Path
    checkpoint: Path | None
    output: Path | None
    cut: int | None
    group_size: int | None
    given: dict[str, Any]

    @property
    def options(self) -> BuildOptions:
        """The build options, with defaults for what the file leaves out."""
        return BuildOptions(**self.given)

    def check_checkpoint(self, path: Path) -> None:
        """Raise BuildError unless the checkpoint at ``path`` has the recipe's cut and group size, CheckpointError
        where it cannot be read."""
        self.check_model(read_model_config(open_model(path)))

    def check_model(self, config: ModelConfig) -> None:
        """Raise BuildError unless the model has the recipe's cut and group size."""
        for name, expected in (("cut", self.cut), ("group_size", self.group_size)):
            found = getattr(config, name)
            if expected is not None and found != expected:
                raise BuildError(
                    f"{self.path} expects a model with {name} {expected}, but the checkpoint has {found}; correct the "
                    "recipe or choose another checkpoint."
                )


def load_recipe(path: str | Path) -> Recipe:
    """Read and validate a recipe. Paths in it are relative to the current directory.

    Raises:
        BuildError: not readable, not YAML, not a mapping, or a key that is unknown, given twice, of the wrong type or
            out of range; the message names key and line.
    """
    path = Path(path)
    values: dict[str, Any] = {name: _value(f"{path}, line {line}", name, node) for name, line, node in _entries(path)}
    paths = {name: Path(values[name]) if name in values else None for name in _PATHS}
    given = {field.name: values[field.name] for field in fields(BuildOptions) if field.name in values}
    return Recipe(path, paths["checkpoint"], paths["output"], values.get("cut"), values.get("group_size"), given)


def _entries(path: Path) -> list[tuple[str, int, yaml.Node]]:
    """Return (key, line, node) of every entry of the file's one mapping."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"The recipe {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or first_line(error)
        raise BuildError(f"{where}: this is not YAML ({problem}).") from None
    except (OverflowError, RecursionError, ValueError):  # an escape beyond Unicode, or thousands of nested lists
        raise BuildError(f"{path}: this is not a recipe; write one 'key: value' per line.") from None
    if not isinstance(root, yaml.MappingNode):
        raise BuildError(f"{path} must be a mapping from keys to values, such as 'target: cpu'.")
    entries: list[tuple[str, int, yaml.Node]] = []
    for key, value in root.value:
        where = f"{path}, line {key.start_mark.line + 1}"
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else key.tag.rsplit(":", 1)[-1]
        if not isinstance(key, yaml.ScalarNode) or name not in KEYS:
            raise BuildError(f"{where}: unknown key {name!r}; known are {', '.join(KEYS)}.")
        if any(name == other for other, _, _ in entries):
            raise BuildError(f"{where}: key {name!r} is given twice; keep one of them.")
        entries.append((name, key.start_mark.line + 1, value))
    return entries


def _value(where: str, name: str, node: yaml.Node) -> str | int | float | bool:
    kind = node.tag.rsplit(":", 1)[-1]
    if name in _NUMBERS and isinstance(node, yaml.ScalarNode) and kind in ("int", "float"):
        return _number(where, name, node)
    wanted = "int" if name in _LIMITS else "bool" if name in _FLAGS else "float" if name in _NUMBERS else "str"
    if not isinstance(node, yaml.ScalarNode) or kind != wanted:
        what = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[wanted]
        found = f"{kind} {node.value!r}" if isinstance(node, yaml.ScalarNode) else f"a {kind}"
        quoted = isinstance(node, yaml.ScalarNode) and wanted == "str" and name not in _CHOICES and node.value
        hint = f"; write it in quotes: '{node.value}'" if quoted else ""
        raise BuildError(f"{where}: {name} must be {what}, not {found}{hint}.")
    if wanted == "str":
        if name in _CHOICES and node.value not in _CHOICES[name]:
            raise BuildError(f"{where}: {name} {node.value!r} is unknown; choose from {', '.join(_CHOICES[name])}.")
        if name == "kv_policy":
            _check_policy(where, node.value)
        if not node.value:
            raise BuildError(f"{where}: {name} is empty; give it a value or leave it out.")
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
            raise BuildError(f"{where}: {name} holds a character that no path may; remove it.")
        return str(node.value)
    if wanted == "bool":
        if node.value.lower() not in ("true", "false"):  # YAML 1.1 has yes and on as well
            raise BuildError(f"{where}: {name} must be true or false, not {node.value!r}.")
        return bool(node.value.lower() == "true")
    try:
        number = yaml.SafeLoader("").construct_yaml_int(node)
    except (ValueError, IndexError):  # an explicit !!int of something else, or thousands of digits
        raise BuildError(f"{where}: {name} must be a whole number, not {node.value[:20]!r}.") from None
    minimum, maximum = _LIMITS[name]
    if number > maximum:
        raise BuildError(f"{where}: {name} must be at most {maximum}.")
    if number < minimum:
        raise BuildError(f"{where}: {name} is {number}; it must be at least {minimum}.")
    return int(number)


def _number(where: str, name: str, node: yaml.ScalarNode) -> float:
    try:
        return float(node.value.replace("_", ""))
    except ValueError:  # such as YAML's .inf, or an explicit !!float of something else
        raise BuildError(f"{where}: {name} must be a number, not {node.value[:20]!r}.") from None


def _check_policy(where: str, text: str) -> None:
    try:
        parse(text)
    except BuildError as error:
        raise BuildError(f"{where}: {error}") from None
