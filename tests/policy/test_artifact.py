"""An artifact is loaded whole and checked, or refused with the field, the values and the file; saved whole or not."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightgbm
import mlflow
import numpy as np
import pytest

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.policy import artifact
from lorazor.policy.artifact import Artifact, load_artifact, read_manifest, save_artifact, update_tasks
from lorazor.policy.manifest import Guarantee, Manifest, TaskPolicy
from tests.policy.conftest import train

BASE = "b" * 64


@pytest.fixture
def saved(tmp_path: Path, manifest: Manifest, model_txt: str) -> Path:
    """A folder with a good artifact."""
    return save_artifact(tmp_path / "policy", manifest, model_txt).path


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "policy.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _rehash(folder: Path, model: bytes) -> None:
    """What somebody with bad intentions would do: change model.txt and its hash."""
    (folder / "model.txt").write_bytes(model)
    digest = hashlib.sha256(model).hexdigest()
    _edit(folder, lambda content: content["sha256"].update({"model.txt": digest}))


def test_round_trip(saved: Path, manifest: Manifest, booster: lightgbm.Booster) -> None:
    """What was saved comes back: every field, and the model's scores to the last bit."""
    loaded = load_artifact(saved, base_fingerprint=BASE, probe_interval=8)
    assert loaded.manifest.model_copy(update={"sha256": {}}) == manifest
    assert sorted(path.name for path in saved.iterdir()) == ["model.txt", "policy.json"]
    rows = np.random.default_rng(0).normal(size=(20, len(FEATURES))).astype(np.float32)
    np.testing.assert_array_equal(loaded.scorer.score(rows), booster.predict(rows))


def test_adapter_is_known_by_its_weights(saved: Path) -> None:
    """An adapter is found by fingerprint, under whatever name; unknown weights have no entry."""
    loaded = load_artifact(str(saved))
    entry = loaded.task_of("5" * 64)
    assert entry is not None
    assert entry.task == "sql"
    assert loaded.task_of("6" * 64) is None


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({key: value})


def _set_task(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tasks"]["sql"].update({key: value})


FIELDS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "format version": (_set("format_version", 1), "format_version is 1, this LoRazor reads version 2: train again"),
    "unknown key": (_set("hook", "rm -rf"), "unknown field hook"),
    "unknown key inside": (_set_task("treshold", 0.5), "unknown field tasks.sql.treshold"),
    "missing key": (lambda content: content.pop("tasks"), "field tasks: Field required"),
    "text for a number": (
        _set("probe_interval", "8"),
        "field probe_interval: Input should be a valid integer, got '8'",
    ),
    "g of 0": (_set("probe_interval", 0), "field probe_interval: Input should be greater than or equal to 1, got 0"),
    "threshold above 1": (_set_task("threshold", 1.5), "field tasks.sql.threshold"),
    "mean of 0": (_set_task("mean_output_tokens", 0), "field tasks.sql.mean_output_tokens"),
    "a hash that is none": (_set("base_fingerprint", "abc"), "field base_fingerprint"),
    "too many thresholds": (_set("threshold_grid", {"sql": [0.5] * 51}), "field threshold_grid.sql"),
    "path for a file": (_set("sha256", {"../model.txt": "0" * 64}), "field sha256"),
    "task that is not there": (lambda content: content["tasks"].pop("sql"), "adapter 'sql-lora' has the task 'sql'"),
    "adapter twice": (lambda content: content["adapters"].append(content["adapters"][0]), "the same fingerprint"),
    "no model listed": (_set("sha256", {}), "is not listed under sha256"),
    "listed file missing": (lambda content: content["sha256"].update(notes="0" * 64), "notes: no such file"),
    "another hash": (lambda content: content["sha256"].update({"model.txt": "0" * 64}), "model.txt: sha256 is "),
    "another schema": (_set("schema_hash", "0" * 64), f"field schema_hash is {'0' * 64}, this LoRazor's features have"),
    "other features": (_set("features", ["entropy"]), "field features is ('entropy',), this LoRazor has ('entropy', "),
}


@pytest.mark.parametrize(("change", "reason"), FIELDS.values(), ids=FIELDS.keys())
def test_bad_field_is_named(saved: Path, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    """A wrong value in policy.json is told with file, field and value, in one line."""
    _edit(saved, change)
    with pytest.raises(InputError) as error:
        load_artifact(saved)
    assert reason in str(error.value)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": 1}', b"[" * 100_000, b"null"])
def test_damaged_policy_json(saved: Path, content: bytes) -> None:
    """policy.json that is cut, no JSON, no object, or nested without end is refused in one line that names it."""
    (saved / "policy.json").write_bytes(content)
    with pytest.raises(InputError, match=r"policy\.json: .+") as error:
        load_artifact(saved)
    assert "\n" not in str(error.value)


def test_hash_is_checked_before_the_model_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model.txt that was changed is refused by its hash, with both values, and no parser ever sees it."""
    good = hashlib.sha256((saved / "model.txt").read_bytes()).hexdigest()
    (saved / "model.txt").write_bytes(b"anything")
    monkeypatch.setattr(artifact, "Scorer", lambda text: pytest.fail("model.txt was parsed"))
    with pytest.raises(InputError) as error:
        load_artifact(saved)
    assert f"sha256 is {hashlib.sha256(b'anything').hexdigest()}, policy.json says {good}" in str(error.value)


@pytest.mark.parametrize(
    "model", [b"", b"anything", b"tree\n\xff", b"tree\nversion=v4\n\nTree=0\nnum_leaves=999999999\n"]
)
def test_hostile_model_with_a_fitting_hash(saved: Path, model: bytes) -> None:
    """Hashes prove that a file is whole, not that it is good: the text is refused all the same, in one line."""
    _rehash(saved, model)
    with pytest.raises(InputError, match=r"policy: model\.txt: ") as error:
        load_artifact(saved)
    assert "\n" not in str(error.value)


def test_another_base_or_probe_interval(saved: Path) -> None:
    """The base and g in use must be the policy's; both values are told."""
    with pytest.raises(InputError, match=rf"field base_fingerprint is {BASE}, the base in use has {'c' * 64}"):
        load_artifact(saved, base_fingerprint="c" * 64)
    with pytest.raises(InputError, match="field probe_interval is 8, the probe interval in use is 16"):
        load_artifact(saved, probe_interval=16)


def test_a_policy_without_probes(tmp_path: Path, manifest: Manifest) -> None:
    """What it says of probes comes back, also from policy.json alone and after tune; without the field there are."""
    without = manifest.model_copy(update={"probes": False})
    saved = save_artifact(tmp_path / "policy", without, train(probes=False).model_to_string()).path
    update_tasks(saved, {})
    assert not load_artifact(saved).manifest.probes
    assert read_manifest(saved) == load_artifact(saved).manifest
    _edit(saved, lambda content: content.pop("probes"))
    assert load_artifact(saved).manifest.probes


def test_a_model_that_splits_on_what_is_never_probed(saved: Path, model_txt: str) -> None:
    """It is refused by the first such feature, whatever its text says that the splits gain."""
    _edit(saved, _set("probes", False))
    for text in (model_txt, re.sub("^split_gain=.*$", "split_gain=", model_txt, flags=re.M)):
        sizes = [len(f"Tree={tree}") for tree in text.partition("end of trees")[0].split("Tree=")[1:]]
        _rehash(saved, re.sub("^tree_sizes=.*$", f"tree_sizes={' '.join(map(str, sizes))}", text, flags=re.M).encode())
        with pytest.raises(InputError, match=r"field probes is false, but model\.txt splits on the probe feature \w+$"):
            load_artifact(saved)


def test_file_that_nobody_listed(saved: Path) -> None:
    """A file that policy.json does not list is refused, so that nothing rides along."""
    (saved / "model.pkl").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match=r"model\.pkl: is not listed under sha256"):
        load_artifact(saved)


def test_no_artifact(tmp_path: Path) -> None:
    """A path that is not there, and a folder without a policy.json, are told apart."""
    with pytest.raises(InputError, match="nowhere: no such policy artifact"):
        load_artifact(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"policy\.json: no such file"):
        load_artifact(tmp_path)


def test_save_replaces_an_artifact_and_nothing_else(saved: Path, manifest: Manifest, model_txt: str) -> None:
    """An artifact is replaced as a whole; a folder that is something else is left alone."""
    save_artifact(saved, manifest.model_copy(update={"probe_interval": 4}), model_txt)
    assert load_artifact(saved).manifest.probe_interval == 4
    assert [path.name for path in saved.parent.iterdir()] == ["policy"]
    other = saved.parent / "thesis"
    other.mkdir()
    (other / "chapter1.txt").write_text("words")
    with pytest.raises(InputError, match="thesis: is in the way and is not a policy artifact"):
        save_artifact(other, manifest, model_txt)
    assert [path.name for path in other.iterdir()] == ["chapter1.txt"]


def test_save_refuses_what_it_would_not_load(saved: Path, manifest: Manifest) -> None:
    """An artifact that would not load is not written: the old one stays, and no draft is left behind."""
    before = (saved / "policy.json").read_bytes()
    with pytest.raises(InputError, match="not the text of a LightGBM model"):
        save_artifact(saved, manifest, "no model")
    assert (saved / "policy.json").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["policy"]


def test_interrupted_save_leaves_the_old_one(
    saved: Path, manifest: Manifest, model_txt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last rename fails, the old artifact is put back and loads."""
    renames = []

    def replace(source: Path, target: Path) -> None:
        renames.append(target)
        if len(renames) == 2:
            raise OSError("no space")
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no space"):
        save_artifact(saved, manifest, model_txt)
    monkeypatch.undo()
    assert load_artifact(saved).manifest.tasks == manifest.tasks
    assert [path.name for path in saved.parent.iterdir()] == ["policy"]


def test_update_tasks(saved: Path) -> None:
    """New operating points replace those of the named tasks, the others stay, and the artifact still loads."""
    guarantee = Guarantee(kind="absolute", max_drop=0.02, confidence=0.95, n=900)
    new = TaskPolicy(threshold=0.5, mean_output_tokens=99.0, guarantee=guarantee)
    update_tasks(saved, {"chat": new})
    tasks = load_artifact(saved).manifest.tasks
    assert tasks["chat"] == new
    assert tasks["sql"].threshold == 0.75
    assert sorted(path.name for path in saved.iterdir()) == ["model.txt", "policy.json"]


def test_update_tasks_of_no_artifact(tmp_path: Path) -> None:
    """Without a policy.json there is nothing to update, and nothing is written."""
    with pytest.raises(InputError, match=r"policy\.json: no such file"):
        update_tasks(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[mlflow.MlflowClient]:
    """An MLflow registry in a folder of its own."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)


def test_registered_artifact(registry: mlflow.MlflowClient, saved: Path, tmp_path: Path) -> None:
    """models:/name@alias loads what was registered as plain files; an unknown name or alias is told."""
    experiment = registry.create_experiment("policies", artifact_location=(tmp_path / "store").as_uri())
    run = registry.create_run(experiment)
    registry.log_artifacts(run.info.run_id, str(saved), "policy")
    registry.create_registered_model("razor")
    version = registry.create_model_version("razor", f"{run.info.artifact_uri}/policy", run.info.run_id)
    registry.set_registered_model_alias("razor", "live", version.version)
    for ref in ("models:/razor@live", "models:/razor/1"):
        loaded = load_artifact(ref, base_fingerprint=BASE)
        assert isinstance(loaded, Artifact)
        assert loaded.manifest.schema_hash == SCHEMA_HASH
    for ref in ("models:/razor@gone", "models:/nobody/1", "models:/"):
        with pytest.raises(InputError, match=f"{ref}: MLflow cannot fetch it") as error:
            load_artifact(ref)
        assert "\n" not in str(error.value)


def test_registry_without_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without MLflow says what to install instead of failing on an import."""
    monkeypatch.setitem(__import__("sys").modules, "mlflow.artifacts", None)
    with pytest.raises(InputError, match=r"needs MLflow, which is not installed \(pip install 'lorazor\[training\]'\)"):
        load_artifact("models:/razor@live")
