"""The code of each kind of draft head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from model_defs.config import ModelConfig
from model_defs.draft_graph import DraftGraph, States, draft_weight_specs
from model_defs.draft_head import DraftHead, HeadKind
from model_defs.mtp_graph import MtpGraph, NormedState, mtp_weight_specs
from model_defs.weights import WeightSpec


@dataclass(frozen=True)
class HeadCode:
    """A head's part of the target's graphs, its own graph, and its weights, each of the target and the head."""

    states: Callable[[ModelConfig, DraftHead], nn.Module]
    graph: Callable[[ModelConfig, DraftHead], nn.Module]
    weight_specs: Callable[[ModelConfig, DraftHead], list[WeightSpec]]


HEAD_CODE: Mapping[HeadKind, HeadCode] = {
    "eagle3": HeadCode(States, DraftGraph, draft_weight_specs),
    "mtp": HeadCode(NormedState, MtpGraph, mtp_weight_specs),
}
