"""The signals of one step on the device, by the fused kernels (model runner V2, which needs Triton anyway)."""

from __future__ import annotations

import math

import torch

from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS
from lorazor.kernels.probe_signals import probe_signals
from lorazor.kernels.signals import adapter_signals
from lorazor.kernels.summaries import summarise
from lorazor.runtime.step_plan import StepPlan


def step_signals(
    logits: torch.Tensor, base_logits: torch.Tensor | None, tokens: torch.Tensor, plan: StepPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Signals float32 [n, 4] and probes float32 [n, 5] of the plan's rows; NaN elsewhere.

    Args:
        logits: [n, V] as the model gave them. base_logits: [m, V] the base's, for the plan's probes.
        tokens: int64 [n], the token chosen in each row.
    """
    n, end = len(logits), len(logits) * len(ADAPTER_SIGNALS)
    room = torch.full((end + n * len(PROBE_SIGNALS),), math.nan, dtype=torch.float32, device=logits.device)
    signals, probes = room[:end].view(n, -1), room[end:].view(n, -1)
    summary = summarise(logits, rows=plan.listed)
    adapter_signals(logits, tokens, rows=plan.listed, summary=summary, out=signals)
    if base_logits is not None:
        lists = {"rows": plan.probed, "base_rows": plan.base}
        probe_signals(logits, base_logits, tokens, **lists, summary=summary, out=probes)
    return signals, probes
