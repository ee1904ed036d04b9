"""gpt-oss: a call is a message to a function, whose head says the function's name and whose text is the arguments. What
else the head says is taken off by the format of reasoning, which tells messages apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.grammar_format import Speller
from kvforge.gateway.languages.named_format import NamedFormat
from kvforge.gateway.languages.tool_format import quoted, with_whitespace
from kvforge.gateway.languages.written_format import TokenOf
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL = "<|end|>", "<|call|>"


@dataclass(frozen=True)
class HarmonyFormat(NamedFormat):
    """Any number of messages of the model's, of which the last one may be a call."""

    @property
    def prefix(self) -> str:
        return f"{_CHANNEL}commentary to=functions."

    def forced(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        """As ToolFormat. A turn ends with its call, so that there is one in any case."""
        return self._grammar(["start: one"], functions, Speller(self.marks, token_of))

    @property
    def writes_reasoning(self) -> bool:
        """As ToolFormat: a message like others."""
        return True

    def free(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        spell = Speller(self.marks, token_of)
        channel = spell(_CHANNEL)
        heads = []
        for index, function in enumerate(functions):
            to = f" to=functions.{function.name}"
            heads.append(f'head_{index}: {quoted(to)} {channel} "commentary" | {channel} {quoted("commentary" + to)}')
        rules = [
            "start: TEXT | messages",
            f'messages: (message {spell(_END + _START)} "assistant")* (message | call)',
            f'message: {channel} ("analysis" | "commentary" | "final") {spell(_MESSAGE)} TEXT',
            "call: " + " | ".join(f"head_{index} form? body_{index}" for index in range(len(functions))),
            *heads,
        ]
        return self._grammar(rules, functions, spell)

    def rules(self, function: Function, name: str, spell: Speller) -> list[str]:
        body = name.replace("call", "body")
        arguments = with_whitespace(function.parameters)
        return [f"{name}: {quoted(function.name)} form? {body}", f"{body}: {spell(_MESSAGE)} %json {arguments}"]

    def common_rules(self, spell: Speller) -> list[str]:
        """As GrammarFormat: what the arguments are written in."""
        return [f'form: " json" | " "? {spell(_CONSTRAIN)} "json"']


FORMAT = HarmonyFormat(
    name="harmony",
    signs=(_CHANNEL, _MESSAGE, _CALL),
    foreign=(),
    notation=Notation(begins=_START, closes=_CALL),
    marks=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL),
    before="functions.",
    after=_MESSAGE,
)
