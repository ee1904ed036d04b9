"""Exported modules: what they compute, and what their nodes do not say."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch.export import Dim
from torch.fx import config

from kvforge.compiler.trace import trace, without_lines


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 1:
            raise ValueError("one dimension")
        return x * 2 + 1


@pytest.mark.skipif(not hasattr(config, "do_not_emit_stack_traces"), reason="torch always finds them out")
def test_nodes_do_not_say_which_line_they_come_from() -> None:
    program = trace(Scaled(), (torch.ones(3),), ({0: Dim.DYNAMIC},))
    assert program.module()(torch.ones(5)).tolist() == [3.0] * 5
    assert not any("stack_trace" in node.meta for node in program.graph.nodes)


def test_the_process_is_as_before() -> None:
    before = vars(config).copy()
    with pytest.raises(ValueError, match="one dimension"):
        trace(Scaled(), (torch.ones(3, 3),), None)
    assert {name: value for name, value in vars(config).items() if name in before} == before
    program = torch.export.export(Scaled(), (torch.ones(3),), strict=False)
    assert any("stack_trace" in node.meta for node in program.graph.nodes)


@pytest.mark.skipif(not hasattr(config, "do_not_emit_stack_traces"), reason="torch always finds them out")
def test_the_process_is_as_before_two_threads() -> None:
    began, within = Event(), Event()

    def second() -> None:
        began.set()
        with without_lines():
            within.set()

    with ThreadPoolExecutor(1) as pool:
        with without_lines():
            waiting = pool.submit(second)
            assert began.wait(60) and not within.wait(0.1)
        waiting.result(60)
    assert within.is_set() and not config.do_not_emit_stack_traces
