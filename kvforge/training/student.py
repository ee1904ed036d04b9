"""A SwiftKV student that starts from its teacher: weights copied, new projections made from the old.

Initialisation of the reference implementation: norm_swiftkv from layer `cut`'s input norm, queries from the
same layer, keys and values from the mean over the group's layers.
"""

import torch

from kvforge.training.model import LanguageModel

TEACHER_ONLY = (".q_proj.", ".k_proj.", ".v_proj.")


def new_parameter(name: str) -> bool:
    """Whether a student's parameter belongs to SwiftKV rather than to the teacher."""
    return "_swiftkv" in name


def init_student(teacher: LanguageModel, cut: int, group_size: int) -> LanguageModel:
    """The student of `teacher` before distillation, in the teacher's dtype."""
    config = teacher.config.with_cut(cut, group_size)
    student = LanguageModel(config)
    source = teacher.state_dict()
    weights = {}
    for name in student.state_dict():
        if not new_parameter(name):
            weights[name] = source[name]
        elif name == "model.norm_swiftkv.weight":
            weights[name] = source[f"model.layers.{cut}.input_layernorm.weight"]
        else:
            layer = int(name.split(".")[2])
            group = [i for i in range(cut, config.num_layers) if config.leader(i) == layer]
            members = [layer] if "q_proj" in name else group
            old = name.replace("_swiftkv", "")
            parts = [source[old.replace(f".{layer}.", f".{i}.", 1)] for i in members]
            weights[name] = torch.stack(parts).mean(0)
    student.load_state_dict(weights)
    return student
