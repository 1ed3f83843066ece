"""The paths: checks a request, makes the engine's requests of it, and answers."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client.core import Metric
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import hybridspec
from hybridspec.config import SamplingParams
from hybridspec.engine import LLM, Counters
from hybridspec.engine.request import Request
from hybridspec.models import Tokenizer
from hybridspec.serve.answers import (
    ChatPlan,
    answer_chat,
    answer_completion,
    stream_chat,
    stream_completion,
)
from hybridspec.serve.errors import WRONG_CALL, ApiError, going_down, loading, wrong_call
from hybridspec.serve.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    note_unknown,
    sampling_params,
)
from hybridspec.serve.metrics import Metrics, render
from hybridspec.serve.options import ServeOptions
from hybridspec.serve.replies import Head
from hybridspec.serve.stepper import Stepper, Stream
from hybridspec.serve.tools import forced_call, forced_name, function_schemas
from hybridspec.serve.wire import EventStream, Json, or_disconnect, read_body

__all__ = ["Api"]

_log = logging.getLogger("hybridspec.serve")
_CHARACTERS_PER_TOKEN = 64  # a prompt of more for each token of the context is not even encoded
_CLIENT_GONE = 499  # nobody reads it

Asked = TypeVar("Asked", CompletionBody, ChatBody)


class Api:
    """The state behind the paths.

    Args:
        options: how the server behaves.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.metrics = Metrics({"model_name": options.model_name, **options.labels})
        self.is_draining = False
        self._template_turn = asyncio.Lock()  # one runs at a time; who waits takes no thread
        self._created = int(time.time())
        self._stepper: Stepper | None = None
        self._defaults = SamplingParams()

    # Life

    async def load(self, load_model: Callable[[], LLM]) -> None:
        """Load the model in a thread and begin to serve."""
        llm = await run_in_threadpool(load_model)
        self._defaults = llm.default_sampling_params()
        self._stepper = Stepper(
            llm,
            asyncio.get_running_loop(),
            max_requests=self.options.max_requests,
            on_steps=self.metrics.on_steps,
        )

    def end_requests(self) -> None:
        """End what still runs, telling each client why."""
        if self._stepper is not None:
            self._stepper.end_all(going_down())

    async def close(self) -> None:
        if self._stepper is not None:
            await run_in_threadpool(self._stepper.stop)

    @property
    def stepper(self) -> Stepper:
        if self.is_draining:
            raise going_down()
        if self._stepper is None:
            raise loading()
        return self._stepper

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.stepper.llm.tokenizer
        if tokenizer is None:
            raise ApiError(400, "model: it has no tokenizer, so text cannot be used", param="model")
        return tokenizer

    def check_key(self, http: HttpRequest) -> None:
        """Raise if a key is needed and the request has none of the right ones."""
        if not self.options.api_keys:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        raw = given.strip().encode("utf-8", errors="replace")
        # All are compared, so that the time tells nothing.
        found = [hmac.compare_digest(raw, key.encode()) for key in self.options.api_keys]
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(
                401,
                "authorization: expected a valid key as bearer token",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.options.model_name):
            raise ApiError(
                404,
                f"model: expected {self.options.model_name!r}, got {name[:200]!r}",
                param="model",
                code="model_not_found",
            )

    # What is told about the server

    async def health(self, http: HttpRequest) -> Response:
        if self._stepper is not None and not self._stepper.is_alive:
            raise ApiError(503, "the engine's thread has ended", code="dead")
        return Response()

    async def ready(self, http: HttpRequest) -> Response:
        _ = self.stepper
        return Response()

    async def version(self, http: HttpRequest) -> Response:
        return Json({"version": hybridspec.__version__})

    async def load_now(self, http: HttpRequest) -> Response:
        return Json({"server_load": 0 if self._stepper is None else self._stepper.num_requests})

    async def show_metrics(self, http: HttpRequest) -> Response:
        text = await run_in_threadpool(lambda: render(self.collect()))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def collect(self) -> list[Metric]:
        """Return all metrics as they are now."""
        counters = Counters() if self._stepper is None else self._stepper.llm.counters()
        return self.metrics.collect(counters)

    async def models(self, http: HttpRequest) -> Response:
        self.check_key(http)
        return Json({"object": "list", "data": [self._card()]})

    async def model(self, http: HttpRequest) -> Response:
        self.check_key(http)
        self._check_model(http.path_params["name"])
        return Json(self._card())

    def _card(self) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": self.options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "hybridspec",
        }
        if self._stepper is not None:
            card["max_model_len"] = self._stepper.llm.config.max_model_len
        return card

    # Tokens

    async def tokenize(self, http: HttpRequest) -> Response:
        self.check_key(http)
        body = await read_body(http, TokenizeBody, self.options.limits.body_bytes)
        self._check_model(body.model)
        tokenizer = self.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: expected either prompt or messages", param="prompt")
        text, has_specials = body.prompt, body.add_special_tokens
        if body.messages is not None:
            text = (await self._rendered(body, body.messages, body.tools)).prompt
            has_specials = bool(has_specials)
        assert text is not None
        self._check_length(text)

        def work() -> dict[str, Any]:
            tokens = tokenizer.encode(text, add_special_tokens=has_specials is not False)
            answer: dict[str, Any] = {"count": len(tokens), "tokens": tokens}
            if body.return_token_strs:
                decode = tokenizer.decode
                answer["token_strs"] = [decode([t], skip_special_tokens=False) for t in tokens]
            return answer

        answer = await _engine(work)
        answer["max_model_len"] = self.stepper.llm.config.max_model_len
        return Json(answer)

    async def detokenize(self, http: HttpRequest) -> Response:
        self.check_key(http)
        body = await read_body(http, DetokenizeBody, self.options.limits.body_bytes)
        self._check_model(body.model)
        vocab = self.stepper.llm.model_config.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab:
                message = f"tokens: expected ids in 0..{vocab - 1}, got {token}"
                raise ApiError(400, message, param="tokens")
        tokenizer = self.tokenizer
        text = await _engine(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return Json({"prompt": text})

    # Answers

    async def _asked(self, http: HttpRequest, kind: type[Asked]) -> tuple[Asked, SamplingParams]:
        """Read what is to be continued, and how."""
        self.check_key(http)
        body = await read_body(http, kind, self.options.limits.body_bytes)
        self._check_model(body.model)
        note_unknown(body)
        return body, sampling_params(body, self._defaults, self.options.limits)

    async def completions(self, http: HttpRequest) -> Response:
        body, params = await self._asked(http, CompletionBody)
        tokenizer = self.tokenizer
        prompts = self._prompts(body.prompt)
        has_specials = body.add_special_tokens is not False
        stream = await self._submit(prompts, params, add_special_tokens=has_specials)
        head = self._head("cmpl", "text_completion")
        if body.stream:
            return EventStream(
                stream_completion(body, stream, head, tokenizer, params), stream.drop
            )
        return await _whole(http, stream, answer_completion(body, stream, head, tokenizer))

    async def chat(self, http: HttpRequest) -> Response:
        body, params = await self._asked(http, ChatBody)
        tokenizer = self.tokenizer
        tools = None if body.tool_choice == "none" else body.tools or None
        names = function_schemas(tools)
        forced = forced_name(body.tool_choice, names)
        plan = await self._rendered(body, body.messages, tools)
        plan = self._with_tools(plan, body, names, forced)
        self._check_length(plan.prompt)
        if names and body.parallel_tool_calls is False:
            params = dataclasses.replace(params, stop=(*params.stop, "</tool_call>"))
        stream = await self._submit(
            [plan.prompt], params, add_special_tokens=bool(body.add_special_tokens)
        )
        if body.stream:
            head = self._head("chatcmpl", "chat.completion.chunk")
            return EventStream(stream_chat(body, plan, stream, head, tokenizer), stream.drop)
        head = self._head("chatcmpl", "chat.completion")
        return await _whole(http, stream, answer_chat(body, plan, stream, head, tokenizer))

    def _head(self, prefix: str, kind: str) -> Head:
        is_synthetic = self.stepper.llm.config.acceptance is not None
        return Head.new(prefix, kind, self.options.model_name, is_synthetic=is_synthetic)

    def _prompts(self, given: str | list[Any]) -> list[Any]:
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts: list[Any] = [given] if is_one else list(given)
        most = self.options.limits.prompts
        if not 1 <= len(prompts) <= most:
            message = f"prompt: expected 1 to {most} prompts, got {len(prompts)}"
            raise ApiError(400, message, param="prompt")
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(prompt)
        return prompts

    def _check_length(self, text: str) -> None:
        most = (self.stepper.llm.config.max_model_len or 0) * _CHARACTERS_PER_TOKEN
        if len(text) > most:
            message = f"prompt: expected at most {most} characters, got {len(text)}"
            raise ApiError(400, message, param="prompt")

    async def _submit(
        self, prompts: Sequence[Any], params: SamplingParams, *, add_special_tokens: bool
    ) -> Stream:
        llm = self.stepper.llm

        def make() -> list[Request]:
            return llm.make_requests(prompts, params, add_special_tokens=add_special_tokens)

        requests = await _engine(make)
        return self.stepper.submit(requests)

    async def _rendered(self, body: ChatBody | TokenizeBody, messages: Any, tools: Any) -> ChatPlan:
        llm, options = self.stepper.llm, self.options
        known = llm.chat_templates
        template = body.chat_template
        if template is not None and template not in known and not options.trusts_templates:
            message = "chat_template: templates of requests are not accepted by this server"
            raise ApiError(400, message, param="chat_template")
        template = options.chat_template if template is None else template
        given = body.chat_template_kwargs or {}
        reserved = {"messages", "tools", "chat_template", "add_generation_prompt",
                    "continue_final_message", "chat_template_kwargs"}  # fmt: skip
        if taken := sorted(reserved & given.keys()):
            message = f"chat_template_kwargs: {taken[0]} is a field of its own"
            raise ApiError(400, message, param="chat_template_kwargs")
        opens = body.add_generation_prompt and not body.continue_final_message
        async with self._template_turn:
            prompt = await _engine(
                lambda: llm.chat_prompt(
                    messages,
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=opens,
                    continue_final_message=body.continue_final_message,
                    chat_template_kwargs=given,
                )
            )
        name = "tool_use" if tools and "tool_use" in known else "default"
        text = known.get(name, "") if template is None else known.get(template, template)
        is_reasoning = opens and prompt.rstrip().endswith("<think>")
        return ChatPlan(prompt, has_reasoning="<think>" in text, is_reasoning=is_reasoning)

    def _with_tools(
        self,
        plan: ChatPlan,
        body: ChatBody,
        names: Mapping[str, Mapping[str, Any]] | None,
        forced: str | None,
    ) -> ChatPlan:
        if names is None:
            return plan
        if forced is None and body.tool_choice != "required":
            return dataclasses.replace(plan, tools=names)
        known = self.stepper.llm.chat_templates
        has_xml = any("<function=" in text for text in known.values())
        opening = forced_call(forced, has_xml=has_xml)
        between = "\n</think>\n\n" if plan.is_reasoning else ""
        return ChatPlan(plan.prompt + between + opening, forced=opening, tools=names)


async def _engine(work: Callable[[], Any]) -> Any:
    """Run what takes time in a thread; what it refuses is the client's mistake."""
    try:
        return await run_in_threadpool(work)
    except WRONG_CALL as error:
        raise wrong_call(error) from None


async def _whole(http: HttpRequest, stream: Stream, work: Any) -> Response:
    try:
        answer = await or_disconnect(http, work)
    finally:
        stream.drop()
    return Response(status_code=_CLIENT_GONE) if answer is None else Json(answer)
