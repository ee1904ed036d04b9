"""The graph ``early_exit`` on TensorRT: its profiles, and the session around a plan that records what it is given."""

import pytest
import torch

from kvforge.common.errors import EngineError
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.tensorrt_profiles import input_ranges
from kvforge.runtime.sessions.inputs import LowerStep, UpperStep, VerifyStep
from kvforge.tensorrt.graph_tensors import INPUTS
from tests.support.cuda.fake_stream import FakeStream, fake_current_stream
from tests.support.sessions.fake import fake_manifest

OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32, 3, early_exit=True)


@pytest.mark.parametrize(("profile", "most_tokens"), [("decode", 32), ("mixed", 100)])
def test_profiles_are_those_of_the_upper_graphs_inputs(profile: str, most_tokens: int) -> None:
    assert OPTIONS.graphs == ("lower", "upper", "early_exit", "verify")
    (tokens, width) = input_ranges("early_exit", "hidden", (-1, 64), OPTIONS, profile)
    assert (tokens.minimum, tokens.maximum, width.minimum, width.maximum) == (1, most_tokens, 64, 64)
    (survivors,) = input_ranges("early_exit", "survivor_index", (-1,), OPTIONS, profile)
    assert (survivors.minimum, survivors.optimum, survivors.maximum) == (1, 8, 32)
    for name, shape in (("hidden", (-1, 64)), ("survivor_index", (-1,))):
        assert input_ranges("early_exit", name, shape, OPTIONS, profile) == input_ranges(
            "upper", name, shape, OPTIONS, profile
        )


class RecordingPlan:
    """Writes the survivors' numbers into its logits."""

    workspace_bytes = 64

    def __init__(self) -> None:
        self.inputs, self.outputs = ("survivor_index", "hidden"), ("logits",)
        self.dtypes = {"hidden": torch.bfloat16, "survivor_index": torch.int32, "logits": torch.float32}

    def make_contexts(self, workspace: torch.Tensor, stream: int) -> None:
        pass

    def keep_kernels(self) -> None:
        pass

    def run(self, inputs: dict, outputs: dict, stream: int, nothing: int) -> None:
        assert list(inputs) == ["survivor_index", "hidden"] and list(outputs) == ["logits"]
        outputs["logits"].copy_(inputs["hidden"][inputs["survivor_index"].long()].float().sum(1, keepdim=True))


GRAPHS = (("lower", LowerStep), ("upper", UpperStep))
"""What is behind a step's ``state`` is for blind cuts, which plans do not have."""


def test_a_session_runs_the_plan(trt, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvforge.runtime.sessions import tensorrt as tensorrt_session

    steps = {name: step._fields[: step._fields.index("state")] for name, step in GRAPHS} | {
        "verify": VerifyStep._fields
    }
    assert {name: tuple(INPUTS[name]) for name in steps} == steps  # a plan gets a step's tensors in this order
    manifest = fake_manifest(early_exit=True, dtype="bfloat16", vocab_size=7)
    fake_current_stream(monkeypatch)
    stream = FakeStream()
    others, cpu = {"lower": RecordingPlan(), "upper": RecordingPlan()}, torch.device("cpu")
    session = tensorrt_session.TensorRTSession(manifest, {**others, "early_exit": RecordingPlan()}, stream, cpu)
    hidden = torch.arange(10).view(5, 2).to(torch.bfloat16)
    logits = session.early_exit(hidden, torch.tensor([4, 1], dtype=torch.int32))
    assert logits.dtype == torch.float32 and logits.tolist() == [[17.0] * 7, [5.0] * 7]
    session = tensorrt_session.TensorRTSession(manifest, others, stream, cpu)
    with pytest.raises(EngineError, match="no early exit"):
        session.early_exit(hidden, torch.tensor([4], dtype=torch.int32))
