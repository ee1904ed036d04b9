"""RopePagedKvWrite without effects: pools come in, new pools go out. Two operators, for their numbers of results."""

from typing import Any

import torch
from torch import Tensor

from plugins.operator import NAMESPACE, Operator
from plugins.registration import define_schema


def define_twin(operator: Operator[..., Any], dynamic: bool) -> Any:
    """Declare and return the operator that gives new pools; `dynamic`: with a scale per token and head in place of the
    two numbers. Its arguments are the operator's, without those that it lacks."""
    lacking = (*(("k_scale", "v_scale") if dynamic else operator.optional_tensors), "rotates_keys")
    names = [a.name for a in operator.arguments if a.name not in lacking]
    written = [name for name in operator.writes if name in names]
    numbers = {name: "float" for name, _ in operator.attributes}
    parameters = ", ".join(f"{numbers.get(name, 'Tensor')} {name}" for name in names)
    schema = f"({parameters}) -> ({', '.join('Tensor' for _ in written)})"
    twin = f"{operator.name}{'_dynamic' if dynamic else ''}_functional"

    def write(*values: Any) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=True))
        return operator.write(**given | {name: given[name].clone() for name in written})

    def fake(*values: Any) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=True))
        return tuple(torch.empty_like(given[name]) for name in written)

    define_schema(twin, schema, fake, write)
    return getattr(getattr(torch.ops, NAMESPACE), twin)
