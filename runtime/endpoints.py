"""HTTP endpoints beside the OpenAI ones: what the policy is doing, and where a request let go of its adapter.

`GET /lorazor/status` describes the policy in force and counts; `GET /lorazor/requests/{id}` answers for one request by
the id that the client got (`chatcmpl-…`, `cmpl-…`), streams included, whose chunks carry no release step. Both ask the
workers through `collective_rpc`, so they say what runs, not what was configured. vLLM loads endpoint plugins only when
`VLLM_PLUGINS` names them; `lorazor serve` sees to that.
"""

import asyncio
import hashlib
import secrets
from argparse import Namespace
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

from lorazor.runtime.validate import ExtraArgsMiddleware

# The engine answers between two steps; one that takes longer than this is stuck, and so would the client be.
RPC_TIMEOUT_S = 30.0
# Parts of policy.json that say nothing about how it behaves.
UNTOLD = {"features", "sha256", "format_version"}

router = APIRouter(prefix="/lorazor", tags=["lorazor"])


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Versions, the policy in force (tasks, thresholds, guarantees, probes and g, pins) and the counts so far."""
    _authorize(request)
    workers = await _ask_workers(request, "lorazor_status")
    answer = dict(workers[0] or {})
    if answer.get("policy"):
        answer["policy"] = {key: value for key, value in answer["policy"].items() if key not in UNTOLD}
    return {"lorazor": version("lorazor"), "vllm": _vllm_version(), **answer, "workers": len(workers)}


@router.get("/requests/{request_id}")
async def release_of(request: Request, request_id: str) -> dict[str, Any]:
    """Release step (null: not released), arm, adapter, task and score at release of one request; 404 if unknown."""
    _authorize(request)
    # A completion answers several prompts under one id; the engine numbers them behind it, and most have one.
    for engine_id in (request_id, f"{request_id}-0"):
        for answer in await _ask_workers(request, "lorazor_request", engine_id):
            if answer is not None:
                return dict(answer)
    raise HTTPException(
        404, f"Request {request_id!r} is not known here: the id is wrong, or newer requests took its place in memory."
    )


class Endpoints:
    """vLLM's endpoint plugin of LoRazor (vllm.plugins.endpoint_plugins.interface.EndpointPlugin)."""

    name = "lorazor"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the check of `vllm_xargs` in front of all routes."""
        app.include_router(router)
        app.add_middleware(ExtraArgsMiddleware)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Remember the engine, if it was asked to run LoRazor, and the API keys: vLLM guards only its own prefixes."""
        config = getattr(getattr(engine_client, "vllm_config", None), "additional_config", None)
        asked = isinstance(config, Mapping) and "lorazor" in config
        state.lorazor_engine = engine_client if asked else None
        state.lorazor_keys = _digests(_api_keys(args))


def build() -> Endpoints:
    """The entry point: a fresh plugin object."""
    return Endpoints()


async def _ask_workers(request: Request, method: str, *args: Any) -> list[Mapping[str, Any] | None]:
    engine = getattr(request.app.state, "lorazor_engine", None)
    if engine is None:
        raise HTTPException(503, "This server does not run LoRazor.")
    try:
        async with asyncio.timeout(RPC_TIMEOUT_S):
            answers: list[Mapping[str, Any] | None] = await engine.collective_rpc(method, args=args)
    except TimeoutError:
        raise HTTPException(503, f"The engine did not answer within {RPC_TIMEOUT_S:.0f} s.") from None
    return answers


def _vllm_version() -> str:
    from vllm.version import __version__

    return str(__version__)


def _api_keys(args: Namespace) -> Iterable[str]:
    import vllm.envs as envs

    return [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _authorize(request: Request) -> None:
    keys: list[bytes] = getattr(request.app.state, "lorazor_keys", [])
    if not keys:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(token.encode()).digest()
    # Every key is compared, in constant time, so that the answer's timing says nothing about them.
    matches = [secrets.compare_digest(digest, key) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise HTTPException(401, "Unauthorized")
