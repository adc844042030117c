"""Ids to slots, ranks and embedding rows, against vLLM's own loops over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorazor.runtime.slots import rank_bound, slots_of, to_device

SLOTS = st.lists(st.one_of(st.none(), st.integers(1, 2**40)), min_size=1, max_size=9, unique_by=lambda i: i or object())


@st.composite
def steps(draw: Any) -> tuple[list[int | None], list[int], list[int]]:
    """What lies in each slot, and the adapter ids of tokens and sampled rows."""
    slot_ids = draw(SLOTS)
    ids = st.sampled_from([0, *(i for i in slot_ids if i is not None)])
    return slot_ids, draw(st.lists(ids, min_size=1, max_size=40)), draw(st.lists(ids, min_size=1, max_size=9))


@pytest.mark.vllm
@given(steps())
def test_slots_are_those_of_vllm(step: tuple[list[int | None], list[int], list[int]]) -> None:
    """Token slots, sampled rows' slots and embedding rows equal `convert_mapping`'s, for any ids in any slots."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.utils import convert_mapping

    slot_ids, tokens, samples = step
    mapping = LoRAMapping(tuple(tokens), tuple(samples), is_prefill=True)
    base, sampler, _, embeddings, _ = convert_mapping(
        mapping, slot_ids, len(slot_ids) + 1, 1000, 0, torch.device("cpu")
    )
    got = slots_of(np.array(tokens), slot_ids)
    assert got.dtype == np.int32
    assert got.tolist() == base.tolist()
    assert slots_of(np.array(samples), slot_ids).tolist() == sampler.tolist()
    assert (np.maximum(got, 0).astype(np.int64) * 1000).tolist() == embeddings[1].tolist()


def test_an_adapter_without_a_slot_is_an_error() -> None:
    """As in vLLM, an id that lies in no slot is named; ids below 1 mean no adapter."""
    with pytest.raises(KeyError, match="9"):
        slots_of(np.array([0, 9]), [5, None, 7])
    assert slots_of(np.array([7, 0, 5, -1]), [5, None, 7]).tolist() == [2, -1, 0, -1]
    assert slots_of(np.array([0, 0]), [None]).tolist() == [-1, -1]


def weights(*shapes: tuple[int, ...] | None) -> SimpleNamespace:
    """A layer's weights with these A matrices: one, or a packed list."""
    parts = [None if shape is None else torch.zeros(shape) for shape in shapes]
    return SimpleNamespace(lora_a=parts[0] if len(parts) == 1 else parts)


@pytest.mark.parametrize(
    ("layers", "bound"),
    [
        ([weights((4, 9))], 4),
        ([weights((4, 9)), weights((8, 9), None, (24, 9))], 24),
        ([weights((200, 9))], 64),
        ([weights((4, 9)), weights((3, 4, 9), (3, 4, 9))], 64),
        ([], 0),
    ],
)
def test_rank_bound(layers: list[Any], bound: int) -> None:
    """The widest module counts, packed ones part by part; experts' stacks count as full, and nothing exceeds that."""
    model = SimpleNamespace(loras={str(k): layer for k, layer in enumerate(layers)})
    assert rank_bound(model, 64) == bound


def test_to_device_writes_in_place() -> None:
    """The target keeps its address, which captured graphs read."""
    target = torch.zeros(4, dtype=torch.int64)
    address = target.data_ptr()
    to_device(target[1:3], np.array([5, 6]))
    assert target.tolist() == [0, 5, 6, 0]
    assert target.data_ptr() == address
