"""Every engine has the members of the interface, with its parameters: what is above does not know which it has."""

import inspect

import pytest

from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.guides.compiler import GuideCompiler
from kvforge.runtime.interface import Engine, Guides, WatchedEngine
from kvforge.serving.engine.remote import JudgedGuides, RemoteEngine
from kvforge.vllm_engine.engine import PassedGuides, VllmEngine
from tests.support.serving.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("interface", "kind"),
    [
        (WatchedEngine, LLMEngine), (WatchedEngine, VllmEngine), (Engine, RemoteEngine), (WatchedEngine, FakeEngine),
        (Guides, GuideCompiler), (Guides, PassedGuides), (Guides, JudgedGuides),
    ],
)  # fmt: skip
def test_an_engine_has_what_is_asked_of_it(interface: type, kind: type) -> None:
    wanted = {name: value for base in interface.__mro__ for name, value in vars(base).items()
              if inspect.isfunction(value) and not name.startswith("_")}  # fmt: skip
    assert wanted
    for name, value in wanted.items():
        own = getattr(kind, name)
        names = [*inspect.signature(value).parameters]
        assert [*inspect.signature(own).parameters][: len(names)] == names, name
