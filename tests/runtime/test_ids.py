"""What the client's id is, given the engine's."""

from __future__ import annotations

import pytest

from lorazor.runtime.ids import public_id, sibling


@pytest.mark.parametrize(
    ("internal", "public", "index"),
    [
        ("chatcmpl-abc-0123abcd", "chatcmpl-abc", None),
        ("cmpl-abc-0-0123abcd", "cmpl-abc-0", None),
        ("1_chatcmpl-abc-0123abcd", "chatcmpl-abc", 1),
        ("7-8fd71d4f", "7", None),
        ("plain", "plain", None),
    ],
)
def test_engine_ids_are_read(internal: str, public: str, index: int | None) -> None:
    """The suffix and the sibling's number are vLLM's; the rest is the client's."""
    assert public_id(internal) == public
    assert sibling(internal) == index
