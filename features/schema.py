"""The names of the features, in the order in which a policy sees them, and a hash that says when they changed.

A policy artifact stores the hash. Another order, another name or another way of computing one (raise `_REVISION`) is
another schema, and a policy trained on one schema must not score with another.
"""

import hashlib

from lorazor.features.signals import ADAPTER_SIGNALS

WINDOW_FEATURES = (
    *ADAPTER_SIGNALS,
    *(f"{name}_fast" for name in ADAPTER_SIGNALS),
    *(f"{name}_slow" for name in ADAPTER_SIGNALS),
    *(f"{name}_slope" for name in ADAPTER_SIGNALS),
    "token_logprob_mean",
    "entropy_max",
    "margin_min",
)
PROBE_FEATURES = (
    "kl",
    "js",
    "base_top1_agrees",
    "base_token_logprob",
    "base_entropy",
    "logprob_gap",
    "kl_mean",
    "kl_slope",
    "agreement_streak",
    "agreement_rate",
    "steps_since_probe",
)
REQUEST_FEATURES = ("prompt_tokens", "max_tokens", "step", "step_over_max", "step_over_mean")

FEATURES: tuple[str, ...] = WINDOW_FEATURES + PROBE_FEATURES + REQUEST_FEATURES

_REVISION = 1
SCHEMA_HASH: str = hashlib.sha256(f"{_REVISION}\n{','.join(FEATURES)}".encode()).hexdigest()
