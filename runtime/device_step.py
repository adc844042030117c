"""A step on the device, by the fused kernels: signals, probes and the policy's scores of its logits.

Everything lies at fixed addresses, so that on a CUDA device all launches are one graph: captured at the start, for a
few sizes, over lists that end in -1. Elsewhere (and for probes that were a pass of their own) the same launches run one
by one. Model runner V2 only, which needs Triton anyway.
"""

from __future__ import annotations

import logging
from itertools import product

import torch

from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS
from lorazor.kernels.probe_signals import probe_signals
from lorazor.kernels.signals import adapter_signals
from lorazor.kernels.summaries import summarise, summary_shape
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.device_policy import DevicePolicy
from lorazor.runtime.step_plan import BASE, LISTED, PROBED, WINDOWS, Staging, StepPlan

logger = logging.getLogger("vllm.lorazor")

FEW_PAIRS = 16  # in most steps; a program without a pair costs little, thousands of them some microseconds
_SIGNALS, _PROBES, _SCORE = len(ADAPTER_SIGNALS), len(PROBE_SIGNALS), 2  # float32 cells of a row


class DeviceStep:
    """The memory of one step of at most `max_rows` rows, shadows included, and its launches.

    Args:
        like: logits [any, V] of the model's dtype.
        probes: whether any step will have some.

    Attributes:
        graphs: by (rows, pairs); they hold the policy that `start` was given.
    """

    def __init__(self, max_rows: int, like: torch.Tensor, probes: bool = True) -> None:
        self.rows = rows = -(-max_rows // 4) * 4
        self._pair_sizes = sorted({0, min(FEW_PAIRS, rows // 2), rows // 2}) if probes else [0]
        self._most_pairs = rows if probes else 0
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._graphs_policy: DevicePolicy | None = None
        self._found = torch.zeros(rows * (_SCORE + _SIGNALS + _PROBES), dtype=torch.float32, device=like.device)
        cells = torch.split(self._found, [rows * _SCORE, rows * _SIGNALS, rows * _PROBES])
        self._scores, self._signals, self._probes = cells[0].view(torch.float64), *(c.view(rows, -1) for c in cells[1:])
        self._staging = Staging(rows, self._found)
        self._tokens = torch.zeros(rows, dtype=torch.long, device=like.device)
        self._take_room(like)

    def _take_room(self, like: torch.Tensor) -> None:
        self._logits = like.new_zeros((self.rows, like.shape[1]))
        self._summary = torch.zeros(summary_shape(self._logits), dtype=torch.float32, device=like.device)
        self._terms = torch.zeros((self.rows, 2, self._summary.shape[2]), dtype=torch.float32, device=like.device)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._logits.device

    @property
    def nbytes(self) -> int:
        """What it takes of the device's memory."""
        tensors = self._found, self._staging.lists, self._tokens, self._logits, self._summary, self._terms
        return sum(tensor.nbytes for tensor in tensors)

    def start(self, policy: DevicePolicy | None) -> None:
        """Compile every kernel, which must not be in the middle of an answer, and capture the graphs."""
        self._staging.send(StepPlan(()))
        self._launch(self.rows, self._most_pairs, policy)
        if self.device.type == "cuda":
            # The base's own logits are another argument, but no other kernel.
            try:
                self._capture(policy)
            except Exception:
                self.graphs = {}
                logger.warning("LoRazor: no CUDA graph of the signals; they are launched one by one", exc_info=True)

    def _capture(self, policy: DevicePolicy | None) -> None:
        self._graphs_policy = policy
        for rows, pairs in product({self._row_size(k) for k in range(1, self.rows + 1)}, self._pair_sizes):
            graph = torch.cuda.CUDAGraph()
            # Thread-local: other threads may pin memory meanwhile, as swapping adapters does.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(rows, pairs, policy)
            self.graphs[rows, pairs] = graph

    def _row_size(self, rows: int) -> int:
        quarter = self.rows // 4
        return -(-rows // quarter) * quarter

    def keep(self, logits: torch.Tensor) -> int:
        """Copy a step's logits [n, V], the shadows' among them, before the sampler writes into them; n."""
        if logits.shape[1] != self._logits.shape[1] or logits.dtype != self._logits.dtype:
            logger.warning("LoRazor: logits are %s %s, and not as expected", logits.dtype, tuple(logits.shape))
            self.graphs = {}
            self._take_room(logits)
        self._logits[: len(logits)].copy_(logits)
        return len(logits)

    def run(
        self,
        kept: int,
        tokens: torch.Tensor,
        plan: StepPlan,
        base: torch.Tensor | None = None,
        policy: DevicePolicy | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Launch a step and start what it finds on its way home, where it is once the device is through with the step.

        Args:
            kept: what `keep` gave. tokens: int64 [n], the token chosen in each row, n <= kept.
            base: the base's logits [m, V] for the plan's probes; None: they were kept with the others.

        Returns:
            With a policy: its scores float64 [n], NaN where none was due; nothing if none can be. Without:
            signals float32 [n, 4] and probes float32 [n, 5], NaN in rows that the plan has not.
        """
        self._tokens[: len(tokens)].copy_(tokens)
        self._staging.send(plan, [row for _, row in plan.pairs] if base is None else ())
        few = next((size for size in self._pair_sizes if size >= len(plan.pairs)), self._most_pairs)
        size = self._row_size(kept), few
        graph = self.graphs.get(size) if base is None and policy is self._graphs_policy else None
        if graph is not None:
            graph.replay()
        else:
            self._launch(*size, policy, base)
        return self._fetch(len(tokens), _may_score(policy, len(plan.pairs)), policy is not None)

    def _launch(self, rows: int, pairs: int, policy: DevicePolicy | None, base: torch.Tensor | None = None) -> None:
        lists, logits, summary = self._staging.lists, self._logits, self._summary
        self._found.view(torch.int32).fill_(-1)  # ones alone are a NaN of float32 and of float64
        summarise(logits, rows=lists[LISTED, :rows], out=summary)
        adapter_signals(logits, self._tokens, rows=lists[LISTED, :rows], summary=summary, out=self._signals)
        if pairs:
            probe_signals(
                logits,
                logits if base is None else base,
                self._tokens,
                rows=lists[PROBED, :pairs],
                base_rows=lists[BASE, :pairs],
                summary=summary,
                base_summary=summary if base is None else None,
                terms=self._terms[:pairs],
                out=self._probes,
            )
        if policy is not None:
            signals, probes, windows = self._signals[:rows], self._probes[:rows], lists[WINDOWS:, :rows]
            policy.score(signals, probes, windows, self._scores[:rows] if _may_score(policy, pairs) else None)

    def _fetch(self, n: int, scored: bool, by_policy: bool) -> tuple[torch.Tensor, ...]:
        if by_policy:
            return (self._staging.fetch(0, n * _SCORE).view(torch.float64),) if scored else ()
        start = self.rows * _SCORE
        home = self._staging.fetch(start, len(self._found))
        signals, probes = torch.split(home, [self.rows * _SIGNALS, self.rows * _PROBES])
        return signals.view(self.rows, -1)[:n], probes.view(self.rows, -1)[:n]


def _may_score(policy: DevicePolicy | None, pairs: int) -> bool:
    return policy is not None and (pairs > 0 or policy.interval is not None)


def start_device_policy(core: ReleaseCore, step: DeviceStep) -> DevicePolicy | None:
    """Start the step with the core's policy on its device.

    None where there is no policy, or where it cannot run there (said once): then the host scores.
    """
    if core.artifact is not None and core.followed is not None:
        try:
            forest, interval = core.artifact.scorer.forest(), None if core.probes else core.probe_interval
            policy = DevicePolicy(forest, core.followed.capacity, step.rows, step.device, interval)
            step.start(policy)
            return policy
        except Exception:
            logger.warning("LoRazor: the policy cannot run on the device, so the host runs it", exc_info=True)
    step.start(None)
    return None
