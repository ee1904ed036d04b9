"""The application: routes, and what they share."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvforge.gateway.answers.generation import Generation
from kvforge.gateway.answers.left_header import LEFT_HEADER, LEFT_TOOLS_HEADER
from kvforge.gateway.answers.message_format import MessagesFormat
from kvforge.gateway.answers.response_formats import CompletionFormat, ResponseFormat
from kvforge.gateway.answers.responses_format import ResponsesFormat
from kvforge.gateway.answers.token_answers import text_answer, tokenizer_info, tokens_answer
from kvforge.gateway.answers.tool_answers import chat_format
from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.engine.triton import Triton
from kvforge.gateway.errors import ApiError
from kvforge.gateway.http.auth import ApiKeys
from kvforge.gateway.http.error_faces import MESSAGES, error_response, speaks_messages
from kvforge.gateway.http.held_answers import HeldAnswers
from kvforge.gateway.http.middleware import OPEN_PATHS, Front
from kvforge.gateway.http.openapi import document
from kvforge.gateway.http.openapi_page import add_documents
from kvforge.gateway.http.page.engine_numbers import EngineNumbers
from kvforge.gateway.http.page.static_files import add_files
from kvforge.gateway.http.readiness import Readiness
from kvforge.gateway.http.response_stream import StreamedResponse
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.gateway.requests.reading import BodyReading
from kvforge.gateway.requests.request_body import BodyReader
from kvforge.version import __version__


class Gateway:
    """The endpoints. `triton` exists between start and end of the event loop."""

    def __init__(self, model: ServedModel, options: GatewayOptions) -> None:
        self.model = model
        self.options = options
        self._bodies = BodyReader(options.max_body_bytes, options.body_timeout)
        self._held = HeldAnswers(options.max_answer_bytes)
        self.triton: Triton
        self._readiness: Readiness
        self._reading: BodyReading
        self._numbers: EngineNumbers | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.triton = Triton(self.options.grpc)
        self._readiness = Readiness(self.triton, self.options.state_file, self.model.manifest.vocab_size)
        self._reading = BodyReading(self.model, self.options)
        await self._reading.prepare()
        if self.options.metrics is not None:
            self._numbers = EngineNumbers(self.options.metrics)
        yield
        await self._reading.close()
        await self.triton.close()

    async def completions(self, request: Request) -> Response:
        generation = await self._generation(request, "cmpl-", Endpoint.COMPLETIONS)
        return self._answer(generation, CompletionFormat(generation))

    async def chat(self, request: Request) -> Response:
        generation = await self._generation(request, "chatcmpl-", Endpoint.CHAT)
        return self._answer(generation, chat_format(generation))

    async def responses(self, request: Request) -> Response:
        generation = await self._generation(request, "resp_", Endpoint.RESPONSES)
        return self._answer(generation, ResponsesFormat(generation))

    async def messages(self, request: Request) -> Response:
        generation = await self._generation(request, "msg_", Endpoint.MESSAGES)
        return self._answer(generation, MessagesFormat(generation))

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._asked(request, Endpoint.COUNT_TOKENS)
        return JSONResponse({"input_tokens": asked.num_prompt_tokens})

    async def tokenize(self, request: Request) -> Response:
        asked = await self._asked(request, Endpoint.TOKENIZE)
        written = bytearray()
        for part in tokens_answer(asked, self.model):
            written += part
            await asyncio.sleep(0)
        return Response(bytes(written), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        asked = await self._asked(request, Endpoint.DETOKENIZE)
        return Response(text_answer(asked), media_type="application/json")

    async def tokenizer_info(self) -> Response:
        return JSONResponse(tokenizer_info(self.model))

    async def models(self, request: Request) -> Response:
        if speaks_messages(request.scope):
            return JSONResponse(models_page(self.model))
        return JSONResponse({"object": "list", "data": [self.model.card(name) for name in self.model.names]})

    async def one_model(self, request: Request, name: str) -> Response:
        self.model.check_name(name)
        found = model_info(self.model, name) if speaks_messages(request.scope) else self.model.card(name)
        return JSONResponse(found)

    async def ready(self) -> Response:
        problem = await self._readiness.problem()
        return JSONResponse({"ready": problem is None, "reason": problem}, 200 if problem is None else 503)

    async def page_model(self) -> Response:
        """What the page must know of the model."""
        chat, metrics = self.model.chat_template is not None, self.options.metrics is not None
        return JSONResponse(
            {
                "model": self.model.name,
                "chat": chat,
                "max_model_len": self.model.max_seq_len,
                "metrics": metrics,
                "sampling": self.model.sampling.values,
            }
        )

    async def page_metrics(self) -> Response:
        if self._numbers is None:
            raise ApiError(404, "this gateway does not know the server's metrics port; start it with --metrics URL")
        return _prometheus(await self._numbers.text())

    async def engine_metrics(self) -> str:
        """The engine's families, or a comment that says why there are none: the gateway's do not fail with them."""
        if self._numbers is None:
            return "# the gateway does not know the server's metrics port; start it with --metrics URL\n"
        try:
            return await self._numbers.text()
        except ApiError as error:
            return f"# {error}\n"

    async def _generation(self, request: Request, prefix: str, endpoint: Endpoint) -> Generation:
        asked = await self._asked(request, endpoint)
        return Generation(self.triton, self.model, f"{prefix}{_suffix(request)}", asked, request.scope["draft_scope"])

    async def _asked(self, request: Request, endpoint: Endpoint) -> ParsedRequest:
        async with self._bodies.read(request) as data:
            return await self._reading.read(data, endpoint)

    def _answer(self, generation: Generation, form: ResponseFormat) -> StreamedResponse:
        return StreamedResponse(generation, form, self._held.one(), self.options.write_timeout)


def create_app(model: ServedModel, options: GatewayOptions, keys: ApiKeys) -> Front:
    """The application in its outermost layer, which is what a server runs."""
    gateway = Gateway(model, options)
    app = FastAPI(title="kvforge", version=__version__, docs_url=None, openapi_url=None, lifespan=gateway.lifespan)
    app.post("/v1/completions")(gateway.completions)
    app.post("/v1/chat/completions")(gateway.chat)
    app.post("/v1/responses")(gateway.responses)
    app.post(MESSAGES)(gateway.messages)
    app.post(f"{MESSAGES}/count_tokens")(gateway.count_tokens)
    app.post("/tokenize")(gateway.tokenize)
    app.post("/detokenize")(gateway.detokenize)
    app.get("/tokenizer_info")(gateway.tokenizer_info)
    app.post("/v1/embeddings", include_in_schema=False)(embeddings)
    app.get("/v1/models")(gateway.models)
    app.get("/v1/models/{name:path}")(gateway.one_model)
    app.get("/ready")(gateway.ready)
    open_paths = OPEN_PATHS
    if not options.no_page:
        open_paths |= add_files(app)
        app.get("/page/model")(gateway.page_model)
        app.get("/page/metrics")(gateway.page_metrics)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return _prometheus(front.metrics() + await gateway.engine_metrics())

    described = document(app, options, bool(keys))
    open_paths |= add_documents(app, described)
    app.exception_handler(ApiError)(_on_api_error)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(Exception)(_on_failure)
    if options.cors_origin is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[options.cors_origin], allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", LEFT_HEADER, LEFT_TOOLS_HEADER],
        )  # fmt: skip
    front = Front(app, keys, options.max_requests, options.cors_origin, open_paths)
    return front


def _prometheus(text: str) -> Response:
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def embeddings() -> Response:
    """Refused in words of its own: clients ask every server of this kind."""
    raise ApiError(404, "this server generates text and computes no embeddings; ask a server of an embedding model")


def _suffix(request: Request) -> str:
    """Part of the answer's id and of Triton's request id: the client's own id, and something it cannot know, so that
    a `stop` with a known id cannot end another client's request."""
    return f"{request.scope['request_id']}-{secrets.token_hex(8)}"


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope.setdefault("log", {})["error"] = error.logged
    response = error_response(error, request.scope)
    if error.status in (408, 413):
        response.headers["Connection"] = "close"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    what = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"this method is not allowed here; use {allowed.replace(', ', ' or ')}",
    }
    said = what.get(error.status_code, str(error.detail))
    response = error_response(ApiError(error.status_code, said), request.scope)
    if allowed:
        response.headers["Allow"] = allowed
    return response


async def _on_failure(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the gateway failed; its log says why"), request.scope)


def model_info(model: ServedModel, name: str) -> dict[str, Any]:
    """The entry for one of the model's names as Anthropic's clients have it; answer and prompt share the context."""
    created = datetime.fromtimestamp(model.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created,
            "lifecycle": "active", "max_input_tokens": model.max_seq_len, "max_tokens": model.max_seq_len}  # fmt: skip


def models_page(model: ServedModel) -> dict[str, Any]:
    """All names on one page."""
    entries = [model_info(model, name) for name in model.names]
    return {"data": entries, "has_more": False, "first_id": model.names[0], "last_id": model.names[-1]}
