"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No time limit for an example: the first one may import torch. In CI the same examples every time, so that a red run
# says something about the change; on a developer's machine new ones.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
