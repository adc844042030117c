"""MLflow with a real sqlite store: what a run holds, and that a registered policy loads from `models:/`."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from lorazor.features.errors import InputError
from lorazor.policy.artifact import load_artifact
from lorazor.training.learned import PARAMS
from lorazor.training.tracking import default_uri, model_name
from lorazor.training.train import train
from tests.planted import planted_traces


@pytest.mark.timeout(120)
def test_a_run_is_logged_and_its_policy_registered_as_plain_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, metrics, figures, digest and artifact are there; `models:/NAME@ALIAS` is the newest version."""
    uri = f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}"
    (tmp_path / "store").mkdir()
    traces = planted_traces(200, seed=1)
    reports = [
        train(traces, tmp_path / f"policy{seed}", seed=seed, mlflow_uri=uri, register_as="sql-release@staging")
        for seed in (0, 1)
    ]
    tracked = reports[1].tracked
    assert tracked is not None
    assert tracked.model == "models:/sql-release@staging"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    run = client.get_run(tracked.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "1"
    assert run.data.params["num_leaves"] == str(PARAMS["num_leaves"])
    assert run.data.tags["data_digest"] == traces.digest()
    assert run.data.metrics["sql/LightGBM/drop_0.01/share"] == pytest.approx(
        reports[1].metrics()["sql/LightGBM/drop_0.01/share"]
    )
    logged = {f.path for top in ("", "policy", "figures") for f in client.list_artifacts(tracked.run_id, top)}
    assert {"report.txt", "policy/policy.json", "policy/model.txt", "figures/reliability.png"} <= logged
    assert "registered as models:/sql-release@staging" in reports[1].render()

    import mlflow

    before = mlflow.get_tracking_uri()
    monkeypatch.chdir(tmp_path)
    try:
        mlflow.set_tracking_uri(uri)
        loaded = load_artifact("models:/sql-release@staging", base_fingerprint=traces.meta.base.fingerprint)
    finally:
        mlflow.set_tracking_uri(before)
    assert loaded.manifest == load_artifact(tmp_path / "policy1").manifest
    assert loaded.manifest != load_artifact(tmp_path / "policy0").manifest


def test_a_store_that_cannot_be_used_is_told_and_the_artifact_is_kept(tmp_path: Path) -> None:
    """An unknown kind of store is an InputError after training; the policy is on disk."""
    with pytest.raises(InputError, match="the MLflow store nosuch://x cannot be used"):
        train(planted_traces(60, seed=1), tmp_path / "policy", mlflow_uri="nosuch://x")
    assert load_artifact(tmp_path / "policy").manifest.trained_on


def test_default_store_is_the_environment_s_or_a_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_TRACKING_URI wins, else mlflow.db in the working folder, where MLflow looks by itself."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert default_uri() == "http://tracking:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert default_uri() == "sqlite:///mlflow.db"


@pytest.mark.parametrize("bad", ["", "@x", "a/b", "a@latest", "a@v3", "a@b c"])
def test_names_that_do_not_resolve_are_refused(bad: str) -> None:
    """What `models:/NAME@ALIAS` could not address is refused at once."""
    with pytest.raises(InputError, match="register as NAME or NAME@ALIAS"):
        model_name(bad)


def test_the_alias_has_a_default() -> None:
    """NAME alone is registered under the alias "trained"."""
    assert model_name("sql-release") == ("sql-release", "trained")
