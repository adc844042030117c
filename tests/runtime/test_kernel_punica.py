"""The kernels behind vLLM's LoRA interface, on a CPU by their reference: against plain products, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm

RANK, VOCAB, ROWS, MAX_LORAS = 16, 40, 11, 3
# Slots 2, -, 1, 0 of adapters 7, none, 5, 9; adapter 9 has rank 8.
SLOT_IDS = [9, 5, 7]
RANKS = {9: 8, 5: 16, 7: 16}
IDS = [7, 0, 5, 9, 9, 0, 7, 7, 0, 5, 9]

torch.manual_seed(0)


def model(lora_id: int, head: bool = False) -> Any:
    """What the wrapper looks at of a loaded adapter."""
    layer = SimpleNamespace(lora_a=torch.zeros(RANKS.get(lora_id, RANK), 4))
    return SimpleNamespace(loras={"layer": layer, **({"lm_head": layer} if head else {})})


def make_manager(heads: tuple[int, ...] = (), **config: Any) -> Any:
    """A stand-in for vLLM's manager, with an embedding and a head among its modules."""
    from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

    modules = {
        "embed": object.__new__(VocabParallelEmbeddingWithLoRA),
        "lm_head": object.__new__(LogitsProcessorWithLoRA),
    }
    return SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=MAX_LORAS, max_lora_rank=RANK, fully_sharded_loras=False, **config),
        lora_index_to_id=list(SLOT_IDS),
        _registered_adapters=SimpleNamespace(cache={i: model(i, i in heads) for i in SLOT_IDS}),
        _get_lora_layer_weights=lambda lora, name: lora.loras.get(name),
        modules=modules,
        vocab_size=VOCAB,
    )


def make(ids: list[int] = IDS, **kwargs: Any) -> Any:
    """A wrapper in the middle of a step."""
    from lorazor.runtime.punica_gpu import KernelPunica

    wrapper = KernelPunica(64, 16, "cpu", make_manager(**kwargs))
    wrapper.update(np.array(ids), np.array(ids))
    return wrapper


def stack(*shape: int) -> torch.Tensor:
    """Weights [MAX_LORAS, 1, …] in which slot 0 (adapter 9) fills rank 8 only."""
    weight = torch.randn(MAX_LORAS, 1, *shape)
    axis = 2 if shape[0] == RANK else 3
    weight[0].narrow(axis - 1, 8, RANK - 8).zero_()
    return weight


def expected(y: torch.Tensor, x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    """y with each row's own adapter added, row by row."""
    out = y.clone()
    for row, lora_id in enumerate(IDS):
        if lora_id:
            slot = SLOT_IDS.index(lora_id)
            parts = [bi[slot, 0] @ (ai[slot, 0] @ x[row]) for ai, bi in zip(a, b, strict=True)]
            out[row, : sum(map(len, parts))] += torch.cat(parts)
    return out


BACKENDS = [None, "eager", "aot_eager"]


def run(call: Callable[..., Any], backend: str | None, *args: torch.Tensor) -> None:
    """Call it, compiled with dynamic shapes and without a graph break where a backend is named."""
    torch._dynamo.reset()
    compiled = call if backend is None else torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    compiled(*args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(24,), (24, 8), (32, 8, 8), (16, 8, 8, 8)])
def test_linear(backend: str | None, widths: tuple[int, ...]) -> None:
    """One to four slices of unequal width; rows without an adapter keep their bits."""
    wrapper = make()
    x, y = torch.randn(ROWS, 12), torch.randn(ROWS, sum(widths))
    a, b = [stack(RANK, 12) for _ in widths], [stack(width, RANK) for width in widths]
    wanted, before = expected(y, x, a, b), y.clone()
    run(lambda y, x: wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, widths), backend, y, x)
    torch.testing.assert_close(y, wanted)
    idle = [row for row, lora_id in enumerate(IDS) if not lora_id]
    assert torch.equal(y[idle], before[idle])


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_that_writes(backend: str | None) -> None:
    """`add_inputs=False` (vLLM's second stream) writes the active rows; batch dimensions are flattened."""
    wrapper = make()
    x, y = torch.randn(1, ROWS, 12), torch.zeros(1, ROWS, 24)
    a, b = [stack(RANK, 12)], [stack(24, RANK)]
    wanted = expected(torch.zeros(ROWS, 24), x[0], a, b)
    run(lambda y, x: wrapper.add_lora_linear(y, x, a, b, 1.0, (24,), add_inputs=False), backend, y, x)
    torch.testing.assert_close(y[0], wanted)


def test_linear_into_float32() -> None:
    """A router answers in float32 while its adapter is in bfloat16."""
    wrapper = make()
    a, b = [stack(RANK, 12).bfloat16()], [stack(8, RANK).bfloat16()]
    x, y = torch.randn(ROWS, 12).bfloat16(), torch.randn(ROWS, 8)
    wanted = expected(y, x.float(), [w.float() for w in a], [w.float() for w in b])
    wrapper.add_lora_linear(y, x, a, b, 1.0, (8,))
    torch.testing.assert_close(y, wanted, atol=0.2, rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_embedding(backend: str | None) -> None:
    """The row of A that each token selects, by the indices that the wrapper fills in, times its B."""
    wrapper = make()
    table, b = torch.randn(MAX_LORAS, VOCAB, RANK), stack(24, RANK)
    table[0, :, 8:] = 0
    ids, y = torch.randint(0, VOCAB, (ROWS,)), torch.randn(ROWS, 24)
    wanted = y.clone()
    for row, lora_id in enumerate(IDS):
        if lora_id:
            slot = SLOT_IDS.index(lora_id)
            wanted[row] += b[slot, 0] @ table[slot, ids[row]]

    def layer(y: torch.Tensor, ids: torch.Tensor) -> None:
        indices = wrapper._embeddings_indices[1][: ids.shape[0]]
        low = torch.nn.functional.embedding(ids + indices, table.view(-1, RANK))
        wrapper.add_lora_embedding(y, low, b, add_input=True)

    run(layer, backend, y, ids)
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parallel", [1, 2])
def test_fully_sharded_columns(backend: str | None, parallel: int) -> None:
    """Each rank shrinks to its part of the rank, the parts are gathered, and each rank expands its columns."""
    wrapper = make()
    widths = (16, 8)
    x, y = torch.randn(ROWS, 12), torch.randn(ROWS, sum(widths))
    a, b = [stack(RANK, 12) for _ in widths], [stack(width, RANK) for width in widths]
    wanted, local = expected(y, x, a, b), RANK // parallel
    shards = [[w[:, :, k * local : (k + 1) * local].contiguous() for w in a] for k in range(parallel)]

    def layer(y: torch.Tensor, x: torch.Tensor) -> None:
        buffers = []
        for shard in shards:
            buffer = torch.zeros(len(widths), x.shape[0], local)
            wrapper.add_shrink(buffer, x, shard, 1.0)
            buffers.append(buffer)
        wrapper.add_expand(y, torch.cat(buffers, dim=-1), b, widths, offset_start=0, add_input=True)

    run(layer, backend, y, x)
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fully_sharded_rows(backend: str | None) -> None:
    """Each rank shrinks its part of the inputs, the sums are added up, and each rank writes its part of the columns."""
    wrapper = make()
    x, y = torch.randn(ROWS, 12), torch.randn(ROWS, 24)
    a, b = stack(RANK, 12), stack(24, RANK)
    wanted = expected(y, x, [a], [b])

    def layer(y: torch.Tensor, x: torch.Tensor) -> None:
        total = torch.zeros(1, x.shape[0], RANK)
        for k in range(2):
            buffer = torch.zeros(1, x.shape[0], RANK)
            part = slice(6 * k, 6 * k + 6)
            wrapper.add_shrink(buffer, x[:, part].contiguous(), [a[..., part].contiguous()], 1.0)
            total += buffer
        for k in range(2):
            half = b[:, :, 12 * k : 12 * k + 12].contiguous()
            wrapper.add_expand(y, total, [half], (12,), offset_start=12 * k, add_input=True)

    run(layer, backend, y, x)
    torch.testing.assert_close(y, wanted)


def test_one_compiled_layer_serves_every_pattern() -> None:
    """Compiled once, then other rows, other counts, none and all: nothing of a step is baked in."""
    wrapper = make()
    a, b = [stack(RANK, 12)], [stack(24, RANK)]
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = torch.compile(
        lambda y, x: wrapper.add_lora_linear(y, x, a, b, 1.0, (24,)), fullgraph=True, dynamic=True, backend=count
    )
    for ids in (IDS, [5] * 6, [0] * 6, [0, 9, 0, 7], IDS[::-1]):
        wrapper.update(np.array(ids), np.array(ids))
        x, y = torch.randn(len(ids), 12), torch.randn(len(ids), 24)
        wanted = y.clone()
        for row, lora_id in enumerate(ids):
            if lora_id:
                slot = SLOT_IDS.index(lora_id)
                wanted[row] += b[0][slot, 0] @ (a[0][slot, 0] @ x[row])
        layer(y, x)
        torch.testing.assert_close(y, wanted)
    assert count.frame_count == 1


def test_padding_rows_are_left_alone() -> None:
    """A graph padded to more rows than the step has does not touch them."""
    wrapper = make()
    a, b = [stack(RANK, 12)], [stack(24, RANK)]
    x, y = torch.randn(16, 12), torch.randn(16, 24)
    before = y.clone()
    wrapper.add_lora_linear(y, x, a, b, 1.0, (24,))
    assert torch.equal(y[ROWS:], before[ROWS:])
    assert not torch.equal(y, before)


def test_nobody_is_the_flag_of_an_empty_step() -> None:
    """Without an adapter in the step the op returns at once; the tile list is emptied all the same, for replays."""
    wrapper = make()
    assert not wrapper.tokens.nobody
    launches = wrapper.tokens.launches
    wrapper.update(np.zeros(5, np.int64), np.zeros(5, np.int64))
    assert wrapper.tokens.nobody
    assert wrapper.tokens.tiles.view(5)[0, 0] == 0
    y = torch.randn(5, 24)
    before = y.clone()
    wrapper.add_lora_linear(y, torch.randn(5, 12), [stack(RANK, 12)], [stack(24, RANK)], 1.0, (24,))
    assert torch.equal(y, before)
    assert wrapper.tokens.launches == launches


def test_an_unchanged_step_costs_nothing_and_moved_slots_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same slots are not copied again; the same ids in other slots are."""
    wrapper = make()
    copies: list[list[int]] = []
    monkeypatch.setattr(wrapper.tokens.tiles, "copy", lambda slots: copies.append(slots.tolist()))
    wrapper.update(np.array(IDS), np.array(IDS))
    assert copies == []
    wrapper.manager.lora_index_to_id = [5, 9, 7]
    wrapper.update(np.array(IDS), np.array(IDS))
    assert copies == [[2, -1, 0, 1, 1, -1, 2, 2, -1, 0, 1]]
    assert wrapper.tokens.ranks.tolist() == [16, 8, 16]


def test_ranks_follow_an_adapter_that_is_loaded_anew() -> None:
    """The same id in the same slot may hold other weights (load_inplace)."""
    wrapper = make()
    address = wrapper.tokens.ranks.data_ptr()
    assert wrapper.tokens.ranks.tolist() == [8, 16, 16]
    wrapper.manager._registered_adapters.cache[9] = model(1000)
    wrapper.update(np.array(IDS), np.array(IDS))
    assert wrapper.tokens.ranks.tolist() == [16, 16, 16]
    assert wrapper.tokens.ranks.data_ptr() == address


@pytest.mark.parametrize(("rank", "bounded"), [(RANK, True), (RANK // 2, False)])
def test_a_shard_of_the_rank_has_no_own_ranks(rank: int, bounded: bool) -> None:
    """A slot's rank says nothing about which columns of a shard it fills."""
    assert (make().tokens.own_ranks(rank) is not None) == bounded


def test_a_rank_below_the_kernels_step_has_no_own_ranks() -> None:
    """The kernels round a slot's rank up to 8, past the end of a buffer of rank 1."""
    from lorazor.runtime.lora_op import ActiveRows

    assert ActiveRows(8, 2, torch.ones(2, dtype=torch.int32), 1).own_ranks(1) is None


def test_logits_of_adapters_with_a_head() -> None:
    """Only rows whose adapter has lm_head weights change; the vocabulary may be padded."""
    wrapper = make(heads=(5,))
    a, b = stack(RANK, 12), stack(VOCAB, RANK)
    x, y = torch.randn(ROWS, 12), torch.randn(ROWS, 64)
    wanted = y.clone()
    for row, lora_id in enumerate(IDS):
        if lora_id == 5:
            wanted[row, :VOCAB] += b[1, 0] @ (a[1, 0] @ x[row])
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    torch.testing.assert_close(y, wanted)
    assert wrapper.samples.launches == 1


def test_logits_cost_nothing_without_a_head() -> None:
    """Where no adapter of the step has lm_head weights nothing is launched, and no list is written."""
    wrapper = make(heads=(5,))
    list_before = wrapper.samples.tiles.view(ROWS).clone()
    wrapper.update(np.array([7, 9]), np.array([7, 9]))
    y = torch.randn(2, VOCAB)
    before = y.clone()
    wrapper.add_lora_logits(y, torch.randn(2, 12), stack(RANK, 12), stack(VOCAB, RANK), 1.0)
    assert torch.equal(y, before)
    assert wrapper.samples.launches == 0
    assert torch.equal(wrapper.samples.tiles.view(ROWS), list_before)


def test_prompt_logprobs_are_the_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of other rows than the sampled ones are left as they are, and that is said once."""
    wrapper = make(heads=(5,))
    said: list[str] = []
    monkeypatch.setattr("lorazor.runtime.punica_gpu.logger.warning", said.append)
    y = torch.randn(3, VOCAB)
    before = y.clone()
    for _ in range(2):
        wrapper.add_lora_logits(y, torch.randn(3, 12), stack(RANK, 12), stack(VOCAB, RANK), 1.0)
    assert torch.equal(y, before)
    assert ["prompt logprobs" in line for line in said] == [True]


def test_a_scale_is_refused() -> None:
    """B already holds it."""
    with pytest.raises(ValueError, match=r"scale must be 1\.0, got 2\.0"):
        make().add_lora_linear(torch.zeros(1, 8), torch.zeros(1, 4), [], [], 2.0, (8,))


def test_vllms_hooks_reach_the_wrapper() -> None:
    """`update_metadata`, which captures and dummy runs use, is the same step; a stock wrapper is kept up to date."""
    from vllm.lora.layers import LoRAMapping

    wrapper = make([0])
    told: list[Any] = []
    wrapper.stock = SimpleNamespace(update_metadata=lambda *args: told.append(args[0]))
    mapping = LoRAMapping(tuple(np.array(IDS, np.int32)), tuple(np.array(IDS, np.int32)), is_prefill=True)
    wrapper.update_metadata(mapping, SLOT_IDS, MAX_LORAS + 1, VOCAB)
    assert told == [mapping]
    assert wrapper._token_slots.tolist() == make()._token_slots.tolist()


def test_two_wrappers_do_not_mix() -> None:
    """Each op finds its own wrapper's step, and a wrapper that is gone leaves nothing behind."""
    import gc

    from lorazor.runtime.lora_op import _KNOWN

    first, second = make(), make([0] * ROWS)
    a, b = [stack(RANK, 12)], [stack(24, RANK)]
    x, y = torch.randn(ROWS, 12), torch.zeros(ROWS, 24)
    second.add_lora_linear(y, x, a, b, 1.0, (24,))
    assert not y.any()
    first.add_lora_linear(y, x, a, b, 1.0, (24,))
    torch.testing.assert_close(y, expected(torch.zeros(ROWS, 24), x, a, b))
    gc.collect()
    known = len(_KNOWN)
    del first, second
    gc.collect()
    assert len(_KNOWN) == known - 4


def test_experts_keep_the_stock_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers get ours; other layers stay with vLLM's wrapper, which ours keeps up to date."""
    from vllm.lora.layers import ReplicatedLinearWithLoRA

    from lorazor.runtime import active_loras
    from lorazor.runtime.punica_gpu import KernelPunica

    class Experts:
        """Not a dense layer."""

        punica_wrapper: Any

    stock = SimpleNamespace(
        _token_lora_indices=torch.zeros(64), _seq_lengths=torch.zeros(16), device=torch.device("cpu")
    )
    dense, experts = object.__new__(ReplicatedLinearWithLoRA), Experts()
    dense.punica_wrapper = experts.punica_wrapper = stock
    manager = make_manager()
    manager.modules, manager.punica_wrapper_mapping = {"dense": dense, "experts": experts}, {"a": stock, "b": stock}
    monkeypatch.setattr(active_loras, "kernels_fit", lambda manager: True)
    active_loras.take_over(manager)
    assert isinstance(dense.punica_wrapper, KernelPunica)
    assert dense.punica_wrapper.stock is stock
    assert experts.punica_wrapper is stock
    assert list(manager.punica_wrapper_mapping.values()) == [dense.punica_wrapper] * 2


@pytest.mark.parametrize(("sharded", "launches"), [(False, 2), (True, 4)])
def test_warm_up_launches_every_signature_and_changes_no_state(
    sharded: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each distinct layer is launched at each row count, over lists of nobody; the wrapper's own step stays."""
    from vllm.lora.layers import ReplicatedLinearWithLoRA

    from lorazor.runtime import warmup
    from lorazor.runtime.lora_op import ActiveRows
    from lorazor.runtime.warmup import row_counts, warm_up

    used: list[ActiveRows] = []

    def watched(*args: Any) -> ActiveRows:
        used.append(ActiveRows(*args))
        return used[-1]

    monkeypatch.setattr(warmup, "ActiveRows", watched)
    wrapper = make(heads=(5,))
    wrapper.manager.lora_config.fully_sharded_loras = sharded
    step = wrapper.tokens.tiles.view(ROWS).clone()
    embedding, head = wrapper.manager.modules.values()
    linear, twin = (object.__new__(ReplicatedLinearWithLoRA) for _ in range(2))
    embedding.lora_a_stacked, embedding.lora_b_stacked = torch.zeros(MAX_LORAS, VOCAB, RANK), stack(24, RANK)
    head.lora_a_stacked, head.lora_b_stacked = stack(RANK, 12), stack(VOCAB, RANK)
    for module in (linear, twin):
        module.lora_a_stacked, module.lora_b_stacked = (stack(RANK, 12),), (stack(24, RANK),)
    wrapper.manager.modules |= {"linear": linear, "twin": twin}
    for module in wrapper.manager.modules.values():
        module.punica_wrapper = wrapper
    warm_up(wrapper)
    assert torch.equal(wrapper.tokens.tiles.view(ROWS), step)
    assert (wrapper.tokens.launches, wrapper.samples.launches) == (0, 0)
    assert [rows.launches for rows in used] == [launches * len(row_counts(64)), len(row_counts(16))]
    assert row_counts(16) == [1, 2, 3, 4, 5, 8, 9, 16]
    assert {512, 513, 1024, 1025} < set(row_counts(2000))
    assert max(row_counts(2000)) == 2000


def test_the_array_table_answers_as_vllms() -> None:
    """Model runner V2's table of adapters, in arrays: the same ids of rows and tokens, and the same adapters."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu.lora_utils import LoraState

    from lorazor.runtime.lora_state import ArrayLoraState

    tables = [LoraState(4), ArrayLoraState(4)]
    for table in tables:
        table.add_request("x", 2, LoRARequest("x", 7, "/nowhere"))
        table.add_request("y", 0, None)
    rows, counts = np.array([0, 2]), np.array([3, 2])
    stock, ours = (table.make_lora_inputs(["y", "x", "z"], rows, counts) for table in tables)
    assert [list(ids) for ids in ours[:2]] == [list(ids) for ids in stock[:2]] == [[0, 7], [0, 0, 0, 7, 7]]
    assert [request.lora_int_id for request in ours[2]] == [7]
    assert all(isinstance(ids, np.ndarray) for ids in ours[:2])
