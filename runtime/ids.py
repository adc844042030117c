"""Request ids: vLLM's engine sees `[<sibling>_]<public id>-<8 hex>` where the client sees `<public id>`."""

from __future__ import annotations

import re

_INTERNAL = re.compile(r"^(?:(?P<sibling>\d+)_)?(?P<public>.+?)(?:-[0-9a-f]{8})?$")


def public_id(internal: str) -> str:
    """The id that the client knows; the siblings of n > 1 share it."""
    match = _INTERNAL.match(internal)
    return match["public"] if match else internal


def sibling(internal: str) -> int | None:
    """Which of the n outputs of a request this is; None where n = 1."""
    match = _INTERNAL.match(internal)
    return int(match["sibling"]) if match and match["sibling"] else None
