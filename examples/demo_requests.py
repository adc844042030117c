"""Sends the demo's requests through the OpenAI client, all at once and streamed, and says where each released.

A stream carries no release step: the server tells it afterwards, at GET /lorazor/requests/{id}. The token ids that
vLLM streams on request (`return_token_ids`) say which part of the text was made before it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI

MAX_TOKENS = 64
CLIENT_SECONDS = 240


@dataclass(frozen=True)
class Answer:
    """One streamed answer; `release_step` is None where the adapter stayed to the end."""

    text: str
    token_ids: tuple[int, ...]  # the end token included
    release_step: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Exchange:
    """One request, answered under the policy and once more with its adapter kept.

    `before` and `after` are the policy's text on either side of the release step.
    """

    task: str
    prompt: str
    policy: Answer
    never: Answer
    before: str
    after: str
    policy_score: float
    never_score: float

    @property
    def same_text(self) -> bool:
        return self.policy.text == self.never.text

    @property
    def released(self) -> bool:
        return self.policy.release_step is not None

    @property
    def adapter_tokens(self) -> int:
        """r of the design: the release step, or the never-released length where there is none."""
        return self.never.tokens if self.policy.release_step is None else self.policy.release_step


def active_row_share(exchanges: Sequence[Exchange]) -> float:
    """Sum of (r - 1) over sum of (L - 1), with L of the never-released answers; 1 when there is nothing to save."""
    steps = sum(e.never.tokens - 1 for e in exchanges)
    return sum(e.adapter_tokens - 1 for e in exchanges) / steps if steps else 1.0


def split_at_release(answer: Answer, decode: Callable[[Sequence[int]], str]) -> tuple[str, str]:
    """The text before the release step and the text after it; joined, they are `answer.text`.

    Args:
        answer: any answer; one that never released is all "before".
        decode: token ids to text, without special tokens.
    """
    if answer.release_step is None:
        return answer.text, ""
    head = decode(answer.token_ids[: answer.release_step])
    # A character that the release cuts in two decodes to U+FFFD; the base made its last byte, so it is the base's.
    head = head if answer.text.startswith(head) else head.rstrip("\ufffd")
    cut = len(head) if answer.text.startswith(head) else 0
    return answer.text[:cut], answer.text[cut:]


async def ask(
    url: str,
    requests: Sequence[tuple[str, list[Any]]],
    xargs: dict[str, Any],
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[Answer], float]:
    """Send all requests at once; their answers in order, and the seconds until the last one was there.

    Args:
        url: of the server.
        requests: adapter and chat messages of each.
        xargs: `vllm_xargs` of every request.
        progress: called for every piece of text that arrives.

    Raises:
        openai.OpenAIError: a request failed.
        httpx.HTTPError: the server does not tell a release step.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CLIENT_SECONDS) as client:
        begin = time.perf_counter()
        streams = [_stream(client, adapter, messages, xargs, progress) for adapter, messages in requests]
        streamed = await asyncio.gather(*streams)
        seconds = time.perf_counter() - begin
    async with httpx.AsyncClient(base_url=url, timeout=CLIENT_SECONDS) as http:
        answers = [Answer(text, ids, await _release_step(http, name)) for name, text, ids in streamed]
    return answers, seconds


async def _stream(
    client: AsyncOpenAI, adapter: str, messages: list[Any], xargs: dict[str, Any], progress: Callable[[], None]
) -> tuple[str, str, tuple[int, ...]]:
    """Request id, text and token ids of one answer."""
    stream = await client.chat.completions.create(
        model=adapter,
        messages=messages,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"vllm_xargs": xargs, "return_token_ids": True},
    )
    name, text = "", ""
    ids: list[int] = []
    async for chunk in stream:
        name = chunk.id
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += (choice.model_extra or {}).get("token_ids") or []
            progress()
    return name, text, tuple(ids)


async def _release_step(http: httpx.AsyncClient, request_id: str) -> int | None:
    answer = await http.get(f"/lorazor/requests/{request_id}")
    answer.raise_for_status()
    step: int | None = answer.json()["release_step"]
    return step
