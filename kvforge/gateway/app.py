"""The application: routes, and what they share."""

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvforge import __version__
from kvforge.gateway.answer import Answer, error_response
from kvforge.gateway.auth import ApiKeys
from kvforge.gateway.body import BodyReader
from kvforge.gateway.errors import ApiError, bad_field
from kvforge.gateway.fields import CHAT, COMPLETIONS, flag, include_usage, integer, screen
from kvforge.gateway.formats import ChatFormat, CompletionFormat
from kvforge.gateway.front import Front
from kvforge.gateway.generation import Generation
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.prompts import chat_prompt, completion_prompts, prompt_texts
from kvforge.gateway.readiness import Readiness
from kvforge.gateway.sampling import MAX_TOKENS, MAX_TOP_LOGPROBS, check_best_of, check_length, sampling_params
from kvforge.gateway.triton import Triton

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI's; a chat's answer may fill the context."""


class Gateway:
    """The endpoints. `triton` exists between start and end of the event loop."""

    def __init__(self, model: ServedModel, options: GatewayOptions) -> None:
        self.model = model
        self.options = options
        self._bodies = BodyReader(options.max_body_bytes, options.body_timeout)
        self.triton: Triton
        self._readiness: Readiness

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.triton = Triton(self.options.grpc)
        self._readiness = Readiness(self.triton, self.options.state_file, self.model.manifest.vocab_size)
        yield
        await self.triton.close()

    async def completions(self, request: Request) -> Response:
        fields = await self._fields(request, COMPLETIONS)
        check_best_of(fields)
        max_tokens = integer(fields, "max_tokens", 1, MAX_TOKENS, DEFAULT_MAX_TOKENS)
        logprobs = integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS)
        echo = flag(fields, "echo")
        if echo and logprobs is not None:
            raise bad_field("echo", "excludes logprobs: those of the prompt are not computed")
        assert max_tokens is not None
        params = sampling_params(fields, self.options, self.model.manifest.vocab_size, max_tokens, logprobs)
        prompts = await completion_prompts(self.model, fields, self.options.max_prompts)
        for prompt in prompts:
            check_length(len(prompt), max_tokens, self.model.max_seq_len, "prompt")
        generation, usage = self._generation(f"cmpl-{_suffix(request)}", fields, prompts, params)
        echoes = prompt_texts(self.model, fields["prompt"], prompts) if echo else []
        return self._answer(generation, CompletionFormat(generation, usage, echoes), usage)

    async def chat(self, request: Request) -> Response:
        fields = await self._fields(request, CHAT)
        prompt = await chat_prompt(self.model, fields)
        if "max_completion_tokens" in fields and "max_tokens" in fields:
            raise bad_field("max_tokens", "excludes max_completion_tokens: give one of them")
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        max_tokens = integer(fields, name, 1, MAX_TOKENS)
        check_length(len(prompt), max_tokens or 1, self.model.max_seq_len, "messages")
        if max_tokens is None:
            max_tokens = self.model.max_seq_len - len(prompt)
        logprobs = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
        if not flag(fields, "logprobs"):
            if logprobs is not None:
                raise bad_field("top_logprobs", "needs logprobs to be true")
        else:
            logprobs = logprobs or 0
        params = sampling_params(fields, self.options, self.model.manifest.vocab_size, max_tokens, logprobs)
        generation, usage = self._generation(f"chatcmpl-{_suffix(request)}", fields, [prompt], params)
        return self._answer(generation, ChatFormat(generation, usage), usage)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self.model.card]})

    async def one_model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self.model.card)

    async def ready(self) -> Response:
        problem = await self._readiness.problem()
        return JSONResponse({"ready": problem is None, "reason": problem}, 200 if problem is None else 503)

    async def _fields(self, request: Request, known: frozenset[str]) -> dict[str, Any]:
        fields = screen(await self._bodies.read_json(request), known)
        if not isinstance(fields.get("model"), str):
            raise bad_field("model", f"must be the model's name, {self.model.name}")
        self._check_model(fields["model"])
        return fields

    def _check_model(self, name: str) -> None:
        if name != self.model.name:
            message = f"the model '{name[:80]}' does not exist; this server has {self.model.name}"
            raise ApiError(404, message, "model", "model_not_found")

    def _generation(
        self, answer_id: str, fields: dict[str, Any], prompts: list[list[int]], params: Any
    ) -> tuple[Generation, bool]:
        stream = flag(fields, "stream")
        usage = include_usage(fields, stream)
        generation = Generation(
            self.triton, self.model, answer_id, prompts, params, stream, not stream or usage,
            self.options.request_timeout,
        )  # fmt: skip
        return generation, usage

    def _answer(self, generation: Generation, form: Any, usage: bool) -> Answer:
        return Answer(generation, form, usage, self.options.write_timeout)


def create_app(model: ServedModel, options: GatewayOptions, keys: ApiKeys) -> Front:
    """The application in its outermost layer, which is what a server runs."""
    gateway = Gateway(model, options)
    app = FastAPI(title="kvforge", version=__version__, docs_url=None, redoc_url=None, lifespan=gateway.lifespan)
    app.post("/v1/completions")(gateway.completions)
    app.post("/v1/chat/completions")(gateway.chat)
    app.get("/v1/models")(gateway.models)
    app.get("/v1/models/{name:path}")(gateway.one_model)
    app.get("/ready")(gateway.ready)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(front.metrics(), media_type="text/plain; version=0.0.4")

    app.exception_handler(ApiError)(_on_api_error)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(Exception)(_on_failure)
    if options.cors_origin is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[options.cors_origin], allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # fmt: skip
    front = Front(app, keys, options.max_requests, options.cors_origin)
    return front


def _suffix(request: Request) -> str:
    """Part of the answer's id and of Triton's request id: the client's own id, and something it cannot know, so that
    nobody's `stop` with a known id ends another's request."""
    return f"{request.scope['request_id']}-{secrets.token_hex(8)}"


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope.setdefault("log", {})["error"] = error.message
    response = error_response(error)
    if error.status in (408, 413):
        response.headers["Connection"] = "close"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is nothing at {request.url.path[:200]}", 405: "this method is not allowed here"}
    return error_response(ApiError(error.status_code, what.get(error.status_code, str(error.detail))))


async def _on_failure(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the gateway failed; its log says why"))
