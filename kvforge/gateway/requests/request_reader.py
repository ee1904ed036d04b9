"""From the bytes of a request's body to what it asks for: parsed, checked, its prompts as token ids.

What this costs, the body decides. So it runs on the event loop for small bodies only, see reading.py.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvforge.common.native_calls import is_panic
from kvforge.common.refusals import PROMPT
from kvforge.gateway.client_words import GUIDE, LENGTH, OF_PROMPT
from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.engine.tensors import request_template
from kvforge.gateway.errors import ApiError, bad_field, too_deep
from kvforge.gateway.languages.asked_forms import Calls, Thinking
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.gateway.requests.functions import read_tools
from kvforge.gateway.requests.guides import guide_field, guided_decoding
from kvforge.gateway.requests.messages.fields import OMITTED
from kvforge.gateway.requests.messages.request import in_message_words, read_message_request
from kvforge.gateway.requests.prompts import chat_text, completion_prompts, encode, json_texts
from kvforge.gateway.requests.request_body import parse
from kvforge.gateway.requests.request_fields import CHAT, COMPLETIONS, Fields, flag, integer, screen, stream_options
from kvforge.gateway.requests.responses_request import in_response_words, read_response_request
from kvforge.gateway.requests.sampling import MAX_TOKENS, MAX_TOP_LOGPROBS, candidates, check_length, sampling_params
from kvforge.gateway.requests.thinking import behind_reasoning, has_begun, thinking
from kvforge.gateway.requests.token_requests import (
    read_detokenize_request,
    read_tokenize_request,
    text_only,
    tokens_only,
)
from kvforge.gateway.requests.tool_guides import ToolGuide
from kvforge.gateway.requests.tool_use import ToolUse, tool_use
from kvforge.runtime.requests.params import SamplingParams
from kvforge.tokenization.conversation import checked_messages

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI's; a chat's answer may fill the context."""
MAX_LETTERS = 64
"""Of a token, generously: text that is longer than the context is not repeated, though a template may leave it out."""


class RequestReader:
    """Reads bodies for one model. Holds no state of requests, so that threads may share it."""

    def __init__(self, model: ServedModel, options: GatewayOptions) -> None:
        self._model = model
        self._options = options

    def read(self, data: bytes, endpoint: Endpoint) -> ParsedRequest:
        """Raises ApiError for a request that cannot be served as asked."""
        try:
            body = parse(data)
            if endpoint == Endpoint.RESPONSES:
                return self._response(body)
            if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS):
                return self._message(body, endpoint == Endpoint.COUNT_TOKENS)
            if endpoint == Endpoint.TOKENIZE:
                return self._tokens(body)
            if endpoint == Endpoint.DETOKENIZE:
                return self._text(body)
            chat = endpoint == Endpoint.CHAT
            fields = screen(body, CHAT if chat else COMPLETIONS)
            self._check_name(fields)
            return self._chat(fields) if chat else self._completion(fields)
        except RecursionError:
            raise too_deep() from None
        except BaseException as error:
            if is_panic(error):
                raise ApiError(400, "the model's tokenizer fails on this text; change the text") from None
            raise

    def _response(self, body: dict[str, Any]) -> ParsedRequest:
        read = read_response_request(body, MAX_LETTERS * self._model.max_seq_len, self._model.sampling.values)
        fields = read.chat
        fields["stream_options"] = {"include_usage": True} if fields.get("stream") else None
        self._check_name(fields)
        try:
            asked = self._chat(fields)
        except ApiError as error:
            raise in_response_words(error) from None
        asks = "text.format" if "response_format" in fields else "tools"
        names = {PROMPT: "input", LENGTH: "max_output_tokens", GUIDE: asks}
        return dataclasses.replace(asked, names=names, shown=read.shown, left_tools=read.left_tools)

    def _message(self, body: dict[str, Any], counted: bool) -> ParsedRequest:
        fields, is_omitted = read_message_request(body, self._model, counted)
        self._check_name(fields)
        try:
            if counted:
                return tokens_only(self._prompt(fields, fits=False)[1])
            asked = self._chat(fields, fills=True)
        except ApiError as error:
            raise in_message_words(error) from None
        asks = "output_config.format" if "response_format" in fields else "tools" if fields["tools"] else "thinking"
        names = {PROMPT: "messages", LENGTH: "max_tokens", GUIDE: asks, "stop": "stop_sequences"}
        return dataclasses.replace(asked, names=names, shown={OMITTED: is_omitted})

    def _tokens(self, body: dict[str, Any]) -> ParsedRequest:
        fields = read_tokenize_request(body)
        self._check_name(fields)
        special = fields.get("add_special_tokens", "messages" not in fields)
        if "messages" in fields:
            # The template shows all tools, and nothing is asked of the answer.
            return tokens_only(self._prompt({**fields, "tool_choice": "none"}, False, special)[1], fields)
        return tokens_only(encode(self._model, fields["prompt"], special, fields["from"], False), fields)

    def _text(self, body: dict[str, Any]) -> ParsedRequest:
        fields = read_detokenize_request(body)
        self._check_name(fields)
        return text_only(self._model, fields)

    def _completion(self, fields: Fields) -> ParsedRequest:
        best_of, n = candidates(fields, self._options.max_n)
        max_tokens = integer(fields, "max_tokens", 0, MAX_TOKENS, DEFAULT_MAX_TOKENS)
        logprobs = integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS)
        echo = fields.get("echo", False)
        echoes_logprobs = echo and logprobs is not None
        if echoes_logprobs and "prompt_logprobs" in fields:
            raise bad_field("prompt_logprobs", "excludes echo with logprobs, which gives the same numbers")
        assert max_tokens is not None
        if max_tokens == 0 and not echo:
            raise bad_field(
                "max_tokens", "is 0, which generates nothing: give 1 or more, or echo to get the prompt back"
            )
        prompts = completion_prompts(self._model, fields, self._options.max_prompts)
        for prompt in prompts:
            check_length(len(prompt), max_tokens, self._model.max_seq_len, "prompt")
        echoes = json_texts(self._model, fields["prompt"], prompts) if echo else ()
        form = guided_decoding(fields)
        guide = None if form is None else ToolGuide(form, {})
        names = {PROMPT: "prompt", LENGTH: "max_tokens", GUIDE: guide_field(fields)}
        if echoes_logprobs:
            fields, names[OF_PROMPT] = {**fields, "prompt_logprobs": logprobs}, "echo"
        ranked = best_of > n
        wanted = 0 if ranked and logprobs is None else logprobs
        asked = self._asked({**fields, "n": best_of}, prompts, max(max_tokens, 1), wanted, names, echoes, guide)
        return dataclasses.replace(
            asked, kept=n if ranked else 0, silent=ranked and logprobs is None, empty=max_tokens == 0
        )

    def _prompt(
        self, fields: Fields, fits: bool = True, special: bool = False
    ) -> tuple[ToolUse, list[int], bool | None]:
        """What a chat's tools mean for it, its prompt, and what `has_begun` says of that."""
        tools = read_tools(fields)
        use = tool_use(self._model, fields, tools)
        is_forced = use.calls is not None and use.calls.forced
        text = chat_text(self._model, fields, None if tools is None else tools.shown, is_forced)
        last = checked_messages(fields["messages"][-1:])[0] if fields.get("continue_final_message") else None
        begun = has_begun(self._model, text, None if last is None else last["content"])
        use = behind_reasoning(self._model, fields, use, begun)
        prefix = "" if use.calls is None else use.calls.prefix
        return use, encode(self._model, text + prefix, special, "messages", fits), begun

    def _chat(self, fields: Fields, fills: bool = False) -> ParsedRequest:
        """`fills`: where more is asked for than the context holds, the answer may fill it."""
        use, prompt, begun = self._prompt(fields)
        if len({json.dumps(fields[name]) for name in ("max_completion_tokens", "max_tokens") if name in fields}) > 1:
            raise bad_field("max_tokens", "differs from max_completion_tokens, the same under another name; give one")
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        max_tokens = integer(fields, name, 1, MAX_TOKENS)
        if fills and max_tokens is not None:
            max_tokens = max(min(max_tokens, self._model.max_seq_len - len(prompt)), 1)
        check_length(len(prompt), max_tokens or 1, self._model.max_seq_len, "messages", name)
        names = {PROMPT: "messages", LENGTH: name, GUIDE: use.field}
        if max_tokens is None:
            max_tokens = self._model.max_seq_len - len(prompt)
        logprobs = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
        if not flag(fields, "logprobs"):
            if logprobs:
                raise bad_field("top_logprobs", "needs logprobs to be true")
            logprobs = None
        else:
            logprobs = logprobs or 0
        return self._asked(
            fields, [prompt], max_tokens, logprobs, names, guide=use.guide, calls=use.calls,
            thinking=thinking(self._model, begun), looser=use.looser,
        )  # fmt: skip

    def _asked(
        self,
        fields: Fields,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: int | None,
        names: dict[str, str],
        echoes: Sequence[bytes] = (),
        guide: ToolGuide | None = None,
        calls: Calls | None = None,
        thinking: Thinking | None = None,
        looser: ToolGuide | None = None,
    ) -> ParsedRequest:
        of_prompt = integer(fields, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)
        stream = fields.get("stream", False)
        if of_prompt is not None and stream and OF_PROMPT not in names:
            raise bad_field("prompt_logprobs", "excludes stream: the prompt's come before all else; leave one out")
        vocab_size = self._model.manifest.vocab_size
        form = None if guide is None else guide.guide
        params = sampling_params(
            fields, self._options, vocab_size, max_tokens, logprobs, form, names[LENGTH], self._model.sampling.values
        )
        params = dataclasses.replace(params, prompt_logprobs=of_prompt)
        usage = stream_options(fields, stream)
        counted = not stream or usage.include_usage

        def template(params: SamplingParams) -> bytes:
            return request_template(params, vocab_size, stream, counted, self._options.request_timeout)

        def left(by: ToolGuide | None) -> dict[str, list[str]]:
            return {} if by is None else {name: list(keywords) for name, keywords in by.left.items()}

        return ParsedRequest(
            model=fields.get("model", self._model.name),
            template=template(params),
            looser=None if looser is None else template(dataclasses.replace(params, guided_decoding=looser.guide)),
            left=left(guide),
            left_by_looser=left(looser),
            prompts=tuple(np.array(prompt, dtype=np.int32).tobytes() for prompt in prompts),
            n=params.n,
            stop=tuple(params.stop),
            logprobs=logprobs,
            stream=stream,
            include_usage=usage.include_usage,
            continuous_usage=usage.continuous_usage,
            echoes=tuple(echoes),
            calls=calls,
            thinking=thinking,
            names=names,
            prompt_logprobs=of_prompt,
        )

    def _check_name(self, fields: Fields) -> None:
        """A request that names no model means the one that is served."""
        name = fields.get("model")
        if name is None:
            return
        if not isinstance(name, str):
            raise bad_field("model", f"must be a name of the model, such as {self._model.name}, or left out")
        self._model.check_name(name)
