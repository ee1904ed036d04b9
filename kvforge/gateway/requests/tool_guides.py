"""The guides of a request's tools: of what can be kept of their schemas, and looser ones where that is too much."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from kvforge.common.errors import RequestError
from kvforge.gateway.client_words import GUIDE, api_error
from kvforge.gateway.errors import bad_field
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.schema_relaxing import ALL, ANY_OBJECT, relaxed
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

Left = dict[str, tuple[str, ...]]
"""The keywords of tools' schemas, by the tool's name, to which nothing but the model keeps; ALL for a whole schema."""


@dataclass(frozen=True)
class ToolGuide:
    """A guide, and what it leaves to the model."""

    guide: GuidedDecoding
    left: Left


def guides_of_tools(
    functions: Sequence[Function],
    make: Callable[[Sequence[Function]], GuidedDecoding],
    unguided: Callable[[Function], Collection[str]],
) -> tuple[ToolGuide, ToolGuide | None]:
    """The guide to ask for, and the one to ask for where the engine refuses that; None where there is no looser one.
    `unguided` are the keywords that `make` does not keep of a function that it is given.

    Raises:
        ApiError: a schema that is strict cannot be kept, or those that are take too much.
    """
    kept, left = list(functions), Left()
    for index, function in enumerate(functions):
        found = relaxed(function.parameters)
        kept[index] = replace(function, parameters=found.schema)
        keywords = tuple(sorted({*found.left, *unguided(kept[index])}))
        if keywords and function.strict:
            what = f"{'its schema' if ALL in keywords else ', '.join(keywords)} cannot be kept"
            raise bad_field(function.field, f"belongs to '{function.name}', which is strict, and {what}; change it")
        left.update({function.name: keywords} if keywords else {})
    first = None
    while first is None:
        try:
            first = ToolGuide(make(kept), dict(left))
        except RequestError as error:
            largest = max(filter(_can_be_looser, kept), key=lambda entry: len(str(entry.parameters)), default=None)
            if largest is None:
                raise api_error(error.refusal, {GUIDE: refused_field(functions)}) from None
            kept[kept.index(largest)] = _any_call(largest, left)
    loose = [_any_call(entry, left) if _can_be_looser(entry) else entry for entry in kept]
    return first, None if loose == kept else ToolGuide(make(loose), left)


def refused_field(functions: Sequence[Function]) -> str:
    """What to name where the engine refuses a guide of which nothing can be left out."""
    strict = [function.field for function in functions if function.strict]
    return strict[0] if len(strict) == 1 else "tools"


def _can_be_looser(function: Function) -> bool:
    """A schema without keywords of any size costs what a looser one does."""
    return not function.strict and any(value for value in function.parameters.values() if not isinstance(value, str))


def _any_call(function: Function, left: Left) -> Function:
    """The function with any object for its arguments, which `left` then says."""
    left[function.name] = (ALL,)
    return replace(function, parameters=ANY_OBJECT)
