"""The entry point that vLLM calls in each of its processes; without our key in additional_config it changes nothing.

Kept free of imports that can fail: vLLM only logs an ImportError here, and the plugin would be silently absent.
"""

from __future__ import annotations


def register() -> None:
    """Let an engine whose additional_config has the key "lorazor" use our worker and scheduler. Safe to repeat."""
    from lorazor.runtime.patches import apply_patches

    apply_patches()
