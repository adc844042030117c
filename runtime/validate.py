"""Checks what a client asks of LoRazor in `vllm_xargs` where the answer can still be HTTP 400: in the API process.

Two gates share one rule. `ExtraArgsMiddleware` reads the JSON body before vLLM does, so that a streaming client also
gets the status 400 (vLLM itself would answer 200 and an error event). `install` wraps
`InputProcessor._validate_params`, which every way into the engine passes, `vllm.LLM` and plain `vllm serve` included.
Neither registers a logits processor: that would move the engine from model runner V2 to V1.
"""

import functools
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from lorazor.features.errors import InputError
from lorazor.policy.rule import parse_options

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def check_extra_args(extra_args: Mapping[str, Any] | None) -> None:
    """Raise InputError (a ValueError), in one sentence, for the first `lorazor_*` entry that a request may not carry.

    The rule is the policy's own, `lorazor.policy.rule.parse_options`; keys of others are none of our business.
    """
    parse_options(extra_args)


def install(input_processor: type) -> None:
    """Make `input_processor._validate_params(params, …)` check `params.extra_args` first; safe to repeat.

    Engines that were not asked for LoRazor (no "lorazor" in `additional_config`) are let through untouched.
    """
    original = input_processor._validate_params  # type: ignore[attr-defined]
    if hasattr(original, "lorazor_original"):
        return

    @functools.wraps(original)
    def checked(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if "lorazor" in _mapping(self.vllm_config.additional_config):
            _check_or_refuse(getattr(params, "extra_args", None))
        return original(self, params, *args, **kwargs)

    checked.lorazor_original = original  # type: ignore[attr-defined]
    input_processor._validate_params = checked  # type: ignore[attr-defined]


def _mapping(value: object) -> Mapping[str, Any]:
    # vLLM also takes an object with a hash method as additional_config.
    return value if isinstance(value, Mapping) else {}


def _check_or_refuse(extra_args: Mapping[str, Any] | None) -> None:
    from vllm.exceptions import VLLMValidationError

    try:
        check_extra_args(extra_args)
    except InputError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


class ExtraArgsMiddleware:
    """ASGI middleware: a JSON body whose `vllm_xargs` breaks the rule is answered with 400 and the sentence."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything through unchanged but POSTed JSON that asks LoRazor for what it cannot give."""
        if not _is_json_post(scope):
            return await self.app(scope, receive, send)
        messages = await _read_body(receive)
        sentence = _complaint(b"".join(message.get("body", b"") for message in messages))
        if sentence is None:
            return await self.app(scope, _replay(messages, receive), send)
        from starlette.responses import JSONResponse

        error = {"message": sentence, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
        return await JSONResponse({"error": error}, status_code=400)(scope, receive, send)


def _is_json_post(scope: Message) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return any(name == b"content-type" and b"json" in value.lower() for name, value in scope["headers"])


async def _read_body(receive: Receive) -> list[Message]:
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def replayed() -> Message:
        for message in waiting:
            return message
        return await receive()

    return replayed


def _complaint(body: bytes) -> str | None:
    # Most bodies never name us: a search of the bytes is all that they cost. What hides from it in JSON escapes, and
    # what is no JSON at all, is for the gate behind this one.
    if b"lorazor_" not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    extra_args = request.get("vllm_xargs") if isinstance(request, dict) else None
    try:
        check_extra_args(extra_args if isinstance(extra_args, dict) else None)
    except InputError as error:
        return str(error)
    return None
