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


@dataclass(frozen=True)
class Answer:
    """One streamed answer; `release_step` is None where the adapter stayed to the end."""

    text: str
    token_ids: tuple[int, ...]  # the end token included
    release_step: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def adapter_tokens(self) -> int:
        """Output tokens made with the adapter: the release step, or all."""
        return self.tokens if self.release_step is None else min(self.release_step, self.tokens)


@dataclass(frozen=True)
class Exchange:
    """One request, answered under the policy and again with its adapter kept."""

    task: str
    prompt: str
    reference: str
    policy: Answer
    never: Answer

    @property
    def same_text(self) -> bool:
        return self.policy.text == self.never.text


def active_row_share(exchanges: Sequence[Exchange]) -> float:
    """Sum of (r - 1) over sum of (L - 1), with L of the never-released answer; 1 when there is nothing to save."""
    steps = sum(e.never.tokens - 1 for e in exchanges)
    held = sum((e.never.tokens if e.policy.release_step is None else e.policy.release_step) - 1 for e in exchanges)
    return held / steps if steps else 1.0


def split_at_release(answer: Answer, decode: Callable[[Sequence[int]], str]) -> tuple[str, str]:
    """The text before the release step and the text after it; joined, they are `answer.text`.

    Args:
        answer: any answer; one that never released is all "before".
        decode: token ids to text, without special tokens.
    """
    if answer.release_step is None:
        return answer.text, ""
    # A character whose bytes lie on both sides decodes to U+FFFD before the release: it belongs to the token that ends it.
    head = decode(answer.token_ids[: answer.release_step]).rstrip("\ufffd")
    cut = len(head) if answer.text.startswith(head) else 0
    return answer.text[:cut], answer.text[cut:]


async def ask(
    url: str, items: Sequence[tuple[str, list[Any]]], xargs: dict[str, Any], progress: Callable[[], None]
) -> tuple[list[Answer], float]:
    """All requests at once; their answers in order, and the seconds until the last one was there.

    Args:
        url: of the server.
        items: (adapter, chat messages) of each request.
        xargs: `vllm_xargs` of every request.
        progress: called for every piece of text that arrives.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        begin = time.perf_counter()
        streams = [_stream(client, adapter, messages, xargs, progress) for adapter, messages in items]
        streamed = await asyncio.gather(*streams)
        seconds = time.perf_counter() - begin
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
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
    name, text, ids = "", "", []
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
