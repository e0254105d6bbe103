"""The tenant port: OpenAI's endpoints, receipts and explanations over one ``TenantBackend``.

Owns the order of a request: authorize, then read, check every item, start, write, release. Invariant:
nothing touches an index, a receipt or the engine before the caller is authorized (K013), a request that
ends in any way leaves no generation behind, and nothing of an answer is written after its namespace
generation was closed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from copyhold.actors.errors import ActorError
from copyhold.models.errors import ChatTemplateError
from copyhold.models.tokenizer import ChatTokenizer
from copyhold.namespace.authority import Authorization
from copyhold.namespace.errors import NamespaceError

from .backend import TenantBackend
from .explain import explanation, receipt_projection
from .http_admission import Admission
from .http_auth import Gatekeeper
from .http_errors import ApiError, body_too_large, exception_handlers, invalid, model_not_found
from .http_exchange import Exchange, Plan
from .http_generate import Answers, LateStarts, PromptPlan
from .http_reply import ChatForm, CompletionForm, Reply, ReplyForm, ReplyHead
from .http_schema import (
    GatewaySettings,
    Options,
    ServedModelInfo,
    decode_body,
    new_token_budget,
    parse_chat,
    parse_completion,
)
from .http_stream import AnswerWriter, OpenStreams

_REQUEST_ID_PREFIX = "req_"
# Longer texts are tokenized beside the event loop, so that one long prompt does not stall other streams.
_INLINE_TEXT_CHARS = 4096


def create_tenant_app(
    backend: TenantBackend,
    tokenizer: ChatTokenizer,
    model: ServedModelInfo,
    settings: GatewaySettings | None = None,
    open_streams: OpenStreams | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    admission: Admission | None = None,
) -> Starlette:
    """Build the tenant port's application.

    ``open_streams`` is the register that a revocation closes, ``admission`` the door that a drain closes.
    """
    gateway = Gateway(backend, tokenizer, model, settings or GatewaySettings(), monotonic, wall_clock)
    gateway.admission = admission or Admission()
    streams = open_streams or OpenStreams()
    chat = GenerationEndpoint(gateway, streams, ChatForm(), gateway.plan_chat)
    completion = GenerationEndpoint(gateway, streams, CompletionForm(), gateway.plan_completion)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/models", gateway.list_models),
        Route("/v1/models/{name:path}", gateway.get_model),
        Route("/v1/receipts/{receipt_id}", gateway.get_receipt),
        Route("/v1/explain/{receipt_id}", gateway.get_explanation),
        Route("/health/live", gateway.live),
        Route("/health/ready", gateway.ready),
    ]
    return Starlette(routes=routes, exception_handlers=exception_handlers())


class Gateway:
    """What every tenant endpoint shares."""

    def __init__(
        self,
        backend: TenantBackend,
        tokenizer: ChatTokenizer,
        model: ServedModelInfo,
        settings: GatewaySettings,
        monotonic: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.model = model
        self.settings = settings
        self.wall_clock = wall_clock
        self.admission = Admission()
        self._gatekeeper = Gatekeeper(backend, settings, monotonic)
        self._late = LateStarts()

    async def authorize(self, request: Request, request_id: str) -> Authorization:
        """As the gatekeeper does; a refusal is counted."""
        try:
            return await self._gatekeeper.authorize(request, request_id)
        except (ApiError, NamespaceError, ActorError) as error:
            self.admission.count_refused(error)
            raise

    def answers(self, authorization: Authorization) -> Answers:
        return Answers(self.backend, self.tokenizer, authorization, self._late)

    # --- plans: every item checked before anything starts ---------------------------------------------------

    async def plan_chat(self, body: Mapping[str, Any]) -> Plan:
        """Check a chat body and render it. Raises: ApiError; nothing started."""
        chat = parse_chat(body, self.model, self.settings)
        messages = [dict(message) for message in chat.messages]
        size = sum(len(message["content"]) for message in messages)
        try:
            tokens = await self._tokenize(self.tokenizer.apply_chat_template, messages, size)
        except ChatTemplateError as error:
            raise invalid("messages", str(error), "chat_template_refused") from error
        return Plan((self._prompt(tokens, "messages", chat.options),), False, chat.options)

    async def plan_completion(self, body: Mapping[str, Any]) -> Plan:
        """Check a completion body, every prompt of it. Raises: ApiError; nothing started."""
        completion = parse_completion(body, self.model, self.settings)
        plans: list[PromptPlan] = []
        for index, prompt in enumerate(completion.prompts):
            if isinstance(prompt, str):
                tokens = await self._tokenize(self.tokenizer.encode, prompt, len(prompt))
            else:
                tokens = prompt
            plans.append(self._prompt(tokens, completion.param(index), completion.options))
        return Plan(tuple(plans), completion.listed, completion.options)

    def stop_ids(self, options: Options) -> tuple[int, ...]:
        own = () if options.ignore_eos else sorted(self.tokenizer.eos_ids)
        return tuple(dict.fromkeys((*own, *options.stop_token_ids)))

    async def _tokenize(self, encode: Callable[[Any], list[int]], text: Any, size: int) -> list[int]:
        if size <= _INLINE_TEXT_CHARS:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    def _prompt(self, tokens: list[int], param: str, options: Options) -> PromptPlan:
        budget = new_token_budget(len(tokens), param, options, self.model, self.settings)
        return PromptPlan(tokens, budget, options.sampling.params(), options.stop, options.retention)

    # --- plain endpoints ------------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        await self.authorize(request, new_request_id())
        return json_response({"object": "list", "data": [self._model_card()]})

    async def get_model(self, request: Request) -> Response:
        await self.authorize(request, new_request_id())
        name = request.path_params["name"]
        if name != self.model.name:
            raise model_not_found(name[:200])
        return json_response(self._model_card())

    async def get_receipt(self, request: Request) -> Response:
        authorization = await self.authorize(request, new_request_id())
        receipt = await self.backend.receipt(authorization, request.path_params["receipt_id"])
        return json_response(receipt_projection(receipt))

    async def get_explanation(self, request: Request) -> Response:
        authorization = await self.authorize(request, new_request_id())
        receipt = await self.backend.receipt(authorization, request.path_params["receipt_id"])
        return json_response(explanation(receipt))

    async def live(self, request: Request) -> Response:
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if not self.admission.closed and await self.backend.ready():
            return json_response({"status": "ready"})
        return json_response({"status": "not_ready"}, 503)

    def _model_card(self) -> dict[str, Any]:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": model.owned_by,
            "max_model_len": model.max_model_len,
        }


class GenerationEndpoint:
    """One of the two endpoints that generate; an ASGI application."""

    def __init__(
        self,
        gateway: Gateway,
        open_streams: OpenStreams,
        form: ReplyForm,
        make_plan: Callable[[Mapping[str, Any]], Awaitable[Plan]],
    ) -> None:
        self._gateway = gateway
        self._open_streams = open_streams
        self._form = form
        self._make_plan = make_plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        request = Request(scope, receive)
        request_id = new_request_id()
        authorization = await gateway.authorize(request, request_id)
        gateway.admission.enter()
        plan = await self._make_plan(decode_body(await read_body(request, gateway.settings)))
        answers = gateway.answers(authorization)
        grant = authorization.grant
        try:
            # Registered only now: a body that trickles in must not hold up a revocation.
            with self._open_streams.register(grant.namespace, grant.generation) as stream:
                writer = AnswerWriter(send, stream)
                exchange = Exchange(self._reply(plan, request_id), plan, answers, writer)
                work = exchange.serve(request_id, gateway.stop_ids(plan.options))
                await exchange.finish(stream.run(work, receive), scope, receive, send)
        finally:
            await answers.cancel()

    def _reply(self, plan: Plan, request_id: str) -> Reply:
        head = ReplyHead(
            self._form.id_prefix + request_id.removeprefix(_REQUEST_ID_PREFIX),
            int(self._gateway.wall_clock()),
            self._gateway.model.name,
            plan.listed,
            plan.options.include_usage,
            plan.options.return_token_ids,
        )
        return Reply(self._form, head)


async def read_body(request: Request, settings: GatewaySettings) -> bytes:
    """Read the whole body. Raises: ApiError 413 as soon as it is known to be too long."""
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        parts.append(part)
    return b"".join(parts)


def new_request_id() -> str:
    return _REQUEST_ID_PREFIX + uuid.uuid4().hex


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
