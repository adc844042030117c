"""Adapters that come into slots from images: the same weights, the same texts, and whatever can go wrong meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorazor.runtime.slot_images import SlotImages
from lorazor.runtime.slot_layout import SlotLayout
from tests.runtime.tiny import Ask, Reference, Tiny, assert_text, counts, engine, lora, prompt, run, tokens, worker

pytestmark = pytest.mark.vllm


def swaps_of(llm: Any) -> Any:
    return worker(llm).model_runner.swaps


def settle(llm: Any) -> None:
    """Wait for what is under way in the background."""
    swaps_of(llm)._background.submit(lambda: None).result()


def serve(llm: Any, tiny: Tiny, reference: Reference, names: str, seed: int) -> None:
    """A request for each adapter named, one after the other, each with the right text."""
    for k, name in enumerate(names):
        ask = Ask(prompt(seed + k, 8 + k), name, tokens=6)
        (output,) = run(llm, tiny, [ask])
        assert_text(tokens(output), reference, ask)
        settle(llm)


@pytest.fixture(scope="module")
def odd(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny adapters, one that lacks most modules, and one with weights for the embedding and the head."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    folder, adapters = tmp_path_factory.mktemp("odd"), dict(tiny.adapters)
    for name, targets in (("few", ["k_proj", "down_proj"]), ("ends", ["embed_tokens", "lm_head", "q_proj"])):
        base = LlamaForCausalLM.from_pretrained(tiny.base)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        for key, weight in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(weight, std=0.1)
        adapters[name] = str(folder / name)
        model.save_pretrained(adapters[name])
    return Tiny(tiny.base, adapters)


@pytest.fixture(scope="module")
def llm(odd: Tiny) -> Any:
    """Two slots, and room for every adapter on the host."""
    return engine(odd, {}, max_loras=2, max_cpu_loras=8)


def test_an_image_gives_the_slot_that_stock_gives(llm: Any, odd: Tiny) -> None:
    """Bit for bit, whatever the slot held before, for adapters of other ranks and with other modules."""
    manager, swaps = worker(llm).model_runner.lora_manager, swaps_of(llm)
    held = manager._adapter_manager
    layout = SlotLayout(held.modules)
    swaps.look_ahead(())
    for name in odd.adapters:
        request = lora(odd, name)
        manager.add_adapter(request)
        slot = held.lora_index_to_id.index(request.lora_int_id)
        assert swaps.take_counts() == {"stock": 1}
        stock = [part.clone() for part in layout.slot(slot)]
        assert any(bool(part.count_nonzero()) for part in stock)
        settle(llm)
        held.deactivate_adapter(request.lora_int_id)
        for part in layout.slot(slot):
            part.fill_(torch.nan)
        manager.add_adapter(request)
        assert swaps.take_counts() == {"image": 1}
        assert held.lora_index_to_id.index(request.lora_int_id) == slot
        assert all(torch.equal(a, b) for a, b in zip(stock, layout.slot(slot), strict=True))
    assert any("embed" in name for name in layout.modules)
    manager.remove_all_adapters()


def test_texts_are_right_through_many_swaps(llm: Any, odd: Tiny, reference: Reference) -> None:
    """Three adapters on two slots, in turns and together; nearly all of them come from images."""
    serve(llm, odd, reference, "abcabcaabbccacb", 100)
    asks = [Ask(prompt(200 + k, 6 + k), "abc"[k % 3], (None, 3)[k % 2], tokens=12) for k in range(12)]
    for ask, output in zip(asks, run(llm, odd, asks), strict=True):
        assert_text(tokens(output), reference, ask)
    ways = counts(llm, "lorazor_swaps_total")
    assert ways["stock"] <= 3 < ways["image"] + ways.get("prefetched", 0)
    assert counts(llm, "lorazor_swap_microseconds_total")[""] > 0


def run_settled(llm: Any, odd: Tiny, reference: Reference, asks: list[Ask]) -> None:
    """Requests at once, each step after what the background had to do; each with the right text."""
    core, final = llm.llm_engine, {}
    for k, ask in enumerate(asks):
        core.add_request(
            str(k), {"prompt_token_ids": list(ask.prompt)}, ask.params(), lora_request=lora(odd, ask.adapter)
        )
    while core.has_unfinished_requests():
        for output in core.step():
            final[output.request_id] = output
        settle(llm)
    for k, ask in enumerate(asks):
        assert_text(tokens(final[str(k)]), reference, ask)


def test_a_waiting_adapter_is_prefetched(odd: Tiny, reference: Reference) -> None:
    """While another adapter holds the only slot, its files are read and its image is made: the step finds it there."""
    llm = engine(odd, {}, max_loras=1, max_cpu_loras=3)
    run_settled(llm, odd, reference, [Ask(prompt(1, 6), "a", tokens=20), Ask(prompt(2, 6), "b", tokens=6)])
    assert counts(llm, "lorazor_swaps_total") == {"stock": 1, "prefetched": 1}


def test_slots_that_come_free_at_once_find_their_adapters_read(odd: Tiny, reference: Reference) -> None:
    """More than can be on their way to the device: the others come from their images on the host, none from files.

    vLLM fills the slots in an order of its own, so one that is not on its way may take the place of one that is.
    """
    again = {f"{name}2": path for name, path in odd.adapters.items()}
    many = Tiny(odd.base, {**odd.adapters, **again})
    llm = engine(many, {}, max_loras=3, max_cpu_loras=8)
    names = ["a", "b", "c", "few", "ends", "few2"]
    run_settled(llm, many, Reference(many), [Ask(prompt(k, 6), name, tokens=20) for k, name in enumerate(names)])
    ways = counts(llm, "lorazor_swaps_total")
    assert ways["stock"] == 3
    assert ways["prefetched"] >= 1
    assert ways["prefetched"] + ways["image"] == 3


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Tiny:
    """The tiny adapters in folders that a test may change."""
    for name, path in tiny.adapters.items():
        shutil.copytree(path, tmp_path / name)
    return Tiny(tiny.base, {name: str(tmp_path / name) for name in tiny.adapters})


def scale(folder: str, by: float) -> None:
    """Other weights of the same shapes."""
    file = Path(folder) / "adapter_model.safetensors"
    save_file({name: by * weight for name, weight in load_file(file).items()}, file)


@pytest.fixture
def fresh(copied: Tiny) -> Any:
    """An engine with one slot on changeable adapters."""
    return engine(copied, {}, max_loras=1, max_cpu_loras=3)


def test_an_adapter_loaded_anew_is_the_new_one(fresh: Any, copied: Tiny, reference: Reference) -> None:
    """Unloaded, changed and loaded again under its name and id: no image of the old weights is used."""
    serve(fresh, copied, reference, "abab", 300)
    ask = Ask(prompt(310, 9), "a", tokens=12)
    scale(copied.adapters["a"], 0.5)
    core = fresh.llm_engine
    assert core.remove_lora(1)
    assert core.add_lora(lora(copied, "a"))
    for _ in range(3):
        (output,) = run(fresh, copied, [ask])
        assert_text(tokens(output), Reference(copied), ask)
        settle(fresh)
        serve(fresh, copied, reference, "b", 320)
    assert tokens(output) != reference.text(ask.prompt, "a", None, ask.tokens)


def test_what_was_read_ahead_gives_way_to_a_load_on_demand(fresh: Any, copied: Tiny) -> None:
    """Files may have changed since: the client that loads the adapter means those of now."""
    manager, swaps = worker(fresh).model_runner.lora_manager, swaps_of(fresh)
    for _ in range(2):  # one starts to read, the next takes in
        swaps.look_ahead([lora(copied, "c")])
        swaps.prepare()
        settle(fresh)
    (old,) = manager._adapter_manager.list_adapters().values()
    assert fresh.llm_engine.add_lora(lora(copied, "c"))
    (new,) = manager._adapter_manager.list_adapters().values()
    assert new is not old


def test_files_may_go_once_an_adapter_is_held(fresh: Any, copied: Tiny, reference: Reference) -> None:
    """Swaps read nothing from disk while the host holds the adapters."""
    serve(fresh, copied, reference, "ab", 400)
    for name in "ab":
        shutil.rmtree(copied.adapters[name])
    serve(fresh, copied, reference, "abab", 410)


@pytest.mark.parametrize("late", [False, True])
def test_a_read_that_fails_or_is_late_changes_nothing(
    late: bool, fresh: Any, copied: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step reads the files itself, as vLLM does."""
    served = Event()

    def read(request: Any) -> Any:
        assert late
        assert served.wait(60)

    monkeypatch.setattr(swaps_of(fresh)._reader, "_read", read)
    asks = [Ask(prompt(500, 6), "a", tokens=12), Ask(prompt(501, 6), "b", tokens=6)]
    outputs = run(fresh, copied, asks)
    served.set()
    for ask, output in zip(asks, outputs, strict=True):
        assert_text(tokens(output), reference, ask)
    assert counts(fresh, "lorazor_swaps_total") == {"stock": 2}


def test_an_image_that_cannot_be_made_is_done_without(
    fresh: Any, copied: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Images are switched off, which is said once, and vLLM swaps adapters."""
    monkeypatch.setattr(SlotImages, "_write", lambda *args: 1 / 0)
    serve(fresh, copied, reference, "ababab", 600)
    assert counts(fresh, "lorazor_swaps_total") == {"stock": 6}
    assert caplog.text.count("slot images failed") == 1


def test_a_small_budget_keeps_the_images_last_used(copied: Tiny, reference: Reference, monkeypatch: Any) -> None:
    """Room for two images: the third adapter takes that of the one not used for longest, and no text changes."""
    from lorazor.runtime import swaps

    made: list[int] = []
    memory = SlotImages.__init__

    def counted(self: Any, layout: Any, count: int, *args: Any) -> None:
        made.append(count)
        memory(self, layout, 2, *args)

    monkeypatch.setattr(SlotImages, "__init__", counted)
    llm = engine(copied, {}, max_loras=1, max_cpu_loras=3)
    serve(llm, copied, reference, "abcabcbcbc", 700)
    assert made == [3]
    ways = counts(llm, "lorazor_swaps_total")
    assert (ways["stock"], sum(ways.values())) == (6, 10)
    monkeypatch.setattr(swaps, "MOST_BYTES", 1)
    assert swaps_of(engine(copied, {}, max_loras=1, max_cpu_loras=3))._images is None
