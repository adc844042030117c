"""The policy artifact: fingerprints, checked loading, saving, scoring, and a description in words; no vLLM in here."""

from lorazor.policy.artifact import Artifact, load_artifact, save_artifact, update_tasks
from lorazor.policy.fingerprint import fingerprint
from lorazor.policy.inspect import describe, draw_score
from lorazor.policy.manifest import AdapterEntry, Guarantee, Manifest, TaskPolicy
from lorazor.policy.scorer import Scorer

__all__ = [
    "AdapterEntry",
    "Artifact",
    "Guarantee",
    "Manifest",
    "Scorer",
    "TaskPolicy",
    "describe",
    "draw_score",
    "fingerprint",
    "load_artifact",
    "save_artifact",
    "update_tasks",
]
