"""The HTTP endpoints on a real FastAPI app, over a stand-in for the engine client of vLLM."""

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lorazor.runtime import endpoints

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

KNOWN = {
    "request_id": "chatcmpl-1",
    "release_step": 10,
    "arm": "policy",
    "adapter": "sql",
    "task": "wikisql",
    "score": 0.97,
}


class InputProcessor:
    """Accepts any parameters, as vLLM's does those of LoRazor."""

    vllm_config = SimpleNamespace(additional_config={"lorazor": {}})

    def _validate_params(self, params: Any) -> str:
        return "accepted"


class Engine:
    """Answers `collective_rpc` as two workers of one server do: only the first of them knows requests."""

    def __init__(self, status: dict[str, Any], additional_config: object = None) -> None:
        self.status = status
        self.input_processor = InputProcessor()
        self.vllm_config = SimpleNamespace(
            additional_config={"lorazor": {}} if additional_config is None else additional_config
        )

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """The list of answers, one a worker."""
        if method == "lorazor_status":
            return [self.status, self.status]
        assert method == "lorazor_request"
        return [KNOWN if args[0] in ("chatcmpl-1", "cmpl-1-0", "cmpl-1-1") else None, None]


class StuckEngine(Engine):
    """Never answers."""

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        """Wait for longer than any test."""
        await asyncio.sleep(3600)
        return []


def make_client(engine: Any, **args: Any) -> TestClient:
    """An app wired in the order of vLLM's server: routes first, the engine later."""
    plugin, app = endpoints.build(), FastAPI()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, Namespace(**args)))
    return TestClient(app)


def test_status_says_what_the_workers_say() -> None:
    """Versions come first, then the first worker's own words, then how many workers there are."""
    policy = {"tasks": {"wikisql": {"threshold": 0.9}}, "features": ["entropy"] * 40}
    answer = make_client(Engine({"policy": policy})).get("/lorazor/status")
    assert answer.status_code == 200
    assert answer.json()["policy"] == {"tasks": policy["tasks"]}
    assert answer.json()["workers"] == 2
    assert {"lorazor", "vllm"} <= answer.json().keys()


@pytest.mark.parametrize("request_id", ["chatcmpl-1", "cmpl-1", "cmpl-1-1"])
def test_request_by_public_id(request_id: str) -> None:
    """A known request gives its release step, arm, adapter, task and score; a first prompt needs no number."""
    answer = make_client(Engine({})).get(f"/lorazor/requests/{request_id}")
    assert answer.json() == KNOWN


def test_unknown_request_is_404_with_a_sentence() -> None:
    """An id that no worker knows is named in the answer."""
    answer = make_client(Engine({})).get("/lorazor/requests/chatcmpl-2")
    assert answer.status_code == 404
    assert "'chatcmpl-2'" in answer.json()["detail"]


@pytest.mark.parametrize("engine", [None, Engine({}, {}), Engine({}, object())])
def test_no_lorazor_behind_it_is_503(engine: Any) -> None:
    """A render-only server, and an engine without our key, are said to be so and are not asked."""
    answer = make_client(engine).get("/lorazor/status")
    assert answer.status_code == 503
    assert answer.json()["detail"].endswith(".")


def test_stuck_engine_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client does not wait for ever for an engine that does not answer."""
    monkeypatch.setattr(endpoints, "RPC_TIMEOUT_S", 0.05)
    assert make_client(StuckEngine({})).get("/lorazor/status").status_code == 503


def test_api_key_guards_the_endpoints() -> None:
    """With --api-key the endpoints, which vLLM's own guard leaves open, ask for one of the keys."""
    client = make_client(Engine({"policy": None}), api_key=["first", "second"])
    wrong = [{}, {"authorization": "Bearer third"}, {"authorization": "first"}, {"authorization": "Basic first"}]
    for path in ("/lorazor/status", "/lorazor/requests/chatcmpl-1"):
        assert [client.get(path, headers=headers).status_code for headers in wrong] == [401] * 4
        assert client.get(path, headers={"authorization": "Bearer second"}).status_code == 200


def test_bad_xargs_are_refused_on_every_route() -> None:
    """Attaching the routes also puts the check of vllm_xargs in front of the app."""
    client = make_client(Engine({}))
    assert client.post("/anything", json={"vllm_xargs": {"lorazor_release": "soon"}}).status_code == 400


def test_vllm_loads_the_plugin_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own loader finds the entry point when VLLM_PLUGINS names it, and leaves it out otherwise."""
    from vllm.plugins import load_endpoint_plugins

    monkeypatch.setenv("VLLM_PLUGINS", "lorazor")
    assert [plugin.name for plugin in load_endpoint_plugins(("generate",))] == ["lorazor"]
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert load_endpoint_plugins(("generate",)) == []
