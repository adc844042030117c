"""The two gates for `vllm_xargs`: one rule, HTTP 400 with its sentence, and nothing of others touched."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from lorazor.runtime.validate import ExtraArgsMiddleware, check_extra_args, install


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"somebody_elses": {"nested": True}},
        {"lorazor_release": "never"},
        {"lorazor_release": 1, "lorazor_threshold": 0.5, "lorazor_task": "sql"},
        {"lorazor_threshold": 0},
        {"lorazor_threshold": 1.0},
    ],
)
def test_check_extra_args_accepts(extra_args: dict[str, Any] | None) -> None:
    """What the design allows, and whatever does not start with lorazor, passes."""
    check_extra_args(extra_args)


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        ({"lorazor_relase": 3}, ["lorazor_relase", "lorazor_release"]),
        ({"lorazor_release": 0}, ["lorazor_release", "at least 1", "got 0"]),
        ({"lorazor_release": True}, ["lorazor_release", "got True"]),
        ({"lorazor_release": 2.5}, ["lorazor_release", "got 2.5"]),
        ({"lorazor_release": "always"}, ["lorazor_release", '"never"', "'always'"]),
        ({"lorazor_threshold": 1.01}, ["lorazor_threshold", "[0, 1]", "1.01"]),
        ({"lorazor_threshold": math.nan}, ["lorazor_threshold", "nan"]),
        ({"lorazor_threshold": "0.5"}, ["lorazor_threshold", "'0.5'"]),
        ({"lorazor_task": 7}, ["lorazor_task", "got 7"]),
        ({"lorazor_task": "sql", "lorazor_release": []}, ["lorazor_release", "got []"]),
    ],
)
def test_check_extra_args_refuses(extra_args: dict[str, Any], words: list[str]) -> None:
    """A wrong entry is refused in one line that names the key, the rule and the value."""
    with pytest.raises(ValueError, match="lorazor") as caught:
        check_extra_args(extra_args)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.fixture
def client() -> TestClient:
    """An app behind the middleware whose one route gives back the body that it read."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, str]:
        return {"body": (await request.body()).decode(errors="replace")}

    app.add_middleware(ExtraArgsMiddleware)
    return TestClient(app)


def post(client: TestClient, body: bytes, content_type: str = "application/json") -> Any:
    """POST raw bytes to the echo route."""
    return client.post("/echo", content=body, headers={"content-type": content_type})


def test_middleware_answers_400_with_the_sentence(client: TestClient) -> None:
    """A bad entry is answered by the middleware in the shape of vLLM's own errors."""
    answer = post(client, json.dumps({"stream": True, "vllm_xargs": {"lorazor_release": 0}}).encode())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("lorazor_release must be")
    assert error["param"] == "vllm_xargs"
    assert error["code"] == 400


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"lorazor_release": 3}}',
        b'{"vllm_xargs": null, "prompt": "lorazor"}',
        b'{"vllm_xargs": ["lorazor_release"]}',
        b'["lorazor_release"]',
        b'{"vllm_xargs": {"lorazor_release": 0}',
        b"\xff\xfe lorazor",
        b"",
        b"[" * 100_000 + b'"lorazor"',
        b'{"prompt": "' + b"x" * 3_000_000 + b'", "vllm_xargs": {"lorazor_task": "a"}}',
    ],
)
def test_middleware_passes_the_body_on_unchanged(client: TestClient, body: bytes) -> None:
    """Good requests, and those that vLLM itself must refuse, reach the route byte for byte."""
    answer = post(client, body)
    assert answer.status_code == 200
    assert answer.json()["body"] == body.decode(errors="replace")


def test_middleware_reads_only_json(client: TestClient) -> None:
    """A form or an upload is not parsed, whatever it holds."""
    body = b'{"vllm_xargs": {"lorazor_release": 0}}'
    assert post(client, body, "text/plain").json()["body"] == body.decode()


class Processor:
    """What `install` needs of vLLM's InputProcessor: the configuration and the method."""

    def __init__(self, additional_config: Any) -> None:
        self.vllm_config = SimpleNamespace(additional_config=additional_config)

    def _validate_params(self, params: Any, supported_tasks: tuple[str, ...]) -> str:
        return f"{params.extra_args} {supported_tasks}"


@pytest.fixture
def processor() -> type[Processor]:
    """A fresh class, wrapped twice: `register()` runs more than once in a process."""
    fresh = type("Fresh", (Processor,), {"_validate_params": Processor._validate_params})
    install(fresh)
    install(fresh)
    return fresh


@pytest.mark.vllm
def test_install_refuses_with_vllms_exception(processor: type[Processor]) -> None:
    """With LoRazor asked for, a bad entry raises the exception that vLLM turns into HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    bad = SimpleNamespace(extra_args={"lorazor_release": 0})
    with pytest.raises(VLLMValidationError, match="lorazor_release must be") as caught:
        processor({"lorazor": {}})._validate_params(bad, ("generate",))
    assert caught.value.parameter == "vllm_xargs"


@pytest.mark.vllm
def test_a_request_does_not_ask_vllm_for_its_model_runner(processor: type[Processor]) -> None:
    """That answer reads the metadata of every installed package: ten milliseconds a request."""

    class Config(SimpleNamespace):
        @property
        def use_v2_model_runner(self) -> bool:
            raise AssertionError("asked")

    engine = processor({"lorazor": {}})
    engine.vllm_config = Config(**vars(engine.vllm_config))
    engine._validate_params(SimpleNamespace(extra_args={"lorazor_release": 3}), ("generate",))


@pytest.mark.parametrize("config", [{}, {"other": 1}, None, object()])
def test_install_is_inert_unless_asked_for(processor: type[Processor], config: object) -> None:
    """Without the key in additional_config nothing is looked at."""
    bad = SimpleNamespace(extra_args={"lorazor_release": 0})
    assert processor(config)._validate_params(bad, ("generate",)) == "{'lorazor_release': 0} ('generate',)"


def test_install_passes_arguments_and_result_through(processor: type[Processor]) -> None:
    """Good parameters, and pooling parameters (no extra_args the first time), reach the original once."""
    good = SimpleNamespace(extra_args={"lorazor_release": 3})
    assert processor({"lorazor": {}})._validate_params(good, supported_tasks=("a",)) == "{'lorazor_release': 3} ('a',)"
    assert not hasattr(processor._validate_params.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]


@pytest.mark.vllm
def test_install_fits_the_installed_vllm() -> None:
    """The real InputProcessor has the method that is wrapped, with the parameters first."""
    import inspect

    from vllm.v1.engine.input_processor import InputProcessor

    assert list(inspect.signature(InputProcessor._validate_params).parameters)[:2] == ["self", "params"]
