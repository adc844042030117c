"""The policy artifact, a folder of plain files: load it with every check made, save it whole or not at all.

Nothing in it runs code on load. The order of the checks is the point: policy.json first, then the sha256 of every file,
then the schema, the base and g, and only then does LightGBM see model.txt (in a child process, see `scorer.py`).
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES, PROBE_FEATURES, SCHEMA_HASH
from lorazor.policy.manifest import MODEL_FILE, POLICY_FILE, AdapterEntry, Manifest, TaskPolicy, parse_manifest
from lorazor.policy.scorer import Scorer

REGISTRY_PREFIX = "models:/"
_REGISTRY_FILES = {"MLmodel", "registered_model_meta"}
"""What MLflow adds beside the files that were registered."""


@dataclass(frozen=True)
class Artifact:
    """A checked policy: what it says about itself, its model, and where it lies."""

    manifest: Manifest
    scorer: Scorer
    path: Path

    def task_of(self, adapter_fingerprint: str) -> AdapterEntry | None:
        """The adapter with these weights, or None if the policy was not trained on it (then: never release)."""
        for entry in self.manifest.adapters:
            if entry.fingerprint == adapter_fingerprint:
                return entry
        return None


def load_artifact(ref: str | Path, base_fingerprint: str | None = None, probe_interval: int | None = None) -> Artifact:
    """Load and check a policy artifact.

    Args:
        ref: a folder, or `models:/name@alias` or `models:/name/version` of an MLflow registry.
        base_fingerprint: of the base in use; the policy's must be equal. None: not checked.
        probe_interval: g in use; the policy's must be equal. None: not checked.

    Raises:
        InputError: names the file, the field, and both values where two differ.
    """
    folder = _folder(ref)
    path = folder / POLICY_FILE
    manifest = _manifest_in(folder)
    model = _checked_files(folder, manifest)
    _same(path, "schema_hash", manifest.schema_hash, SCHEMA_HASH, "this LoRazor's features have")
    _same(path, "features", tuple(manifest.features), FEATURES, "this LoRazor has")
    if base_fingerprint is not None:
        _same(path, "base_fingerprint", manifest.base_fingerprint, base_fingerprint, "the base in use has")
    if probe_interval is not None:
        _same(path, "probe_interval", manifest.probe_interval, probe_interval, "the probe interval in use is")
    scorer = _scorer(folder, model)
    if not manifest.probes:
        _looks_at_no_probe(folder, scorer)
    return Artifact(manifest, scorer, folder)


def read_manifest(ref: str | Path) -> Manifest:
    """What the artifact `ref`, as `load_artifact` takes it, says about itself; its other files are not looked at.

    Raises:
        InputError: no readable policy.json there.
    """
    return _manifest_in(_folder(ref))


def save_artifact(folder: str | Path, manifest: Manifest, model_txt: str) -> Artifact:
    """Write an artifact (the hashes are filled in), read it back with every check, and put it in place.

    An artifact that lies at `folder` already is replaced; at every moment before the end it is untouched.

    Raises:
        InputError: `folder` holds something else, or the artifact would not load.
    """
    target = Path(folder)
    if target.exists() and not (target / POLICY_FILE).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target}: is in the way and is not a policy artifact; nothing was written")
    model = model_txt.encode()
    complete = manifest.model_copy(update={"sha256": {MODEL_FILE: hashlib.sha256(model).hexdigest()}})
    with _beside(target) as draft:
        draft.mkdir(parents=True)
        (draft / MODEL_FILE).write_bytes(model)
        (draft / POLICY_FILE).write_bytes(_json(complete))
        loaded = load_artifact(draft)
        _put_in_place(draft, target)
    return Artifact(loaded.manifest, loaded.scorer, target)


def update_tasks(folder: str | Path, tasks: Mapping[str, TaskPolicy]) -> Manifest:
    """Give the artifact in `folder` new operating points for these tasks (others stay), in one atomic step.

    Raises:
        InputError: no readable policy.json there.
    """
    target = Path(folder)
    old = _manifest_in(target)
    new = Manifest.model_validate({**old.model_dump(), "tasks": {**old.tasks, **tasks}})
    with _beside(target / POLICY_FILE) as draft:
        draft.write_bytes(_json(new))
        os.replace(draft, target / POLICY_FILE)
    return new


def _folder(ref: str | Path) -> Path:
    return _download(str(ref)) if str(ref).startswith(REGISTRY_PREFIX) else Path(ref)


def _manifest_in(folder: Path) -> Manifest:
    path = folder / POLICY_FILE
    if not folder.is_dir():
        raise InputError(f"{folder}: no such policy artifact (a folder with {POLICY_FILE} and {MODEL_FILE})")
    return parse_manifest(_read(path), path)


def _checked_files(folder: Path, manifest: Manifest) -> bytes:
    """The bytes of model.txt, once every file was found, listed, and equal to its hash."""
    path = folder / POLICY_FILE
    present = {entry.name for entry in folder.iterdir()} - _REGISTRY_FILES - {POLICY_FILE}
    unlisted = sorted(present - manifest.sha256.keys())
    if unlisted:
        raise InputError(f"{folder / unlisted[0]}: is not listed under sha256 in {path}")
    if MODEL_FILE not in manifest.sha256:
        raise InputError(f"{path}: field sha256 does not list {MODEL_FILE}")
    content = {name: _read(folder / name) for name in sorted(manifest.sha256)}
    for name, data in content.items():
        found = hashlib.sha256(data).hexdigest()
        if found != manifest.sha256[name]:
            raise InputError(f"{folder / name}: sha256 is {found}, {POLICY_FILE} says {manifest.sha256[name]}")
    return content[MODEL_FILE]


def _scorer(folder: Path, model: bytes) -> Scorer:
    try:
        return Scorer(model.decode("ascii", errors="replace"))
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None


def _looks_at_no_probe(folder: Path, scorer: Scorer) -> None:
    used = scorer.splits_on()
    for name in PROBE_FEATURES:
        if name in used:
            raise InputError(
                f"{folder / POLICY_FILE}: field probes is false, but {MODEL_FILE} splits on the probe feature {name}"
            )


def _same(path: Path, field: str, has: object, wanted: object, whose: str) -> None:
    if has != wanted:
        raise InputError(f"{path}: field {field} is {has}, {whose} {wanted}")


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: not readable ({error.strerror})") from None


def _json(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=2).encode() + b"\n"


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A path for a draft on the same file system; whatever is left at it afterwards is removed."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield draft
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def _put_in_place(draft: Path, target: Path) -> None:
    """Rename `draft` to `target`; an old artifact steps aside first, because a full folder cannot be renamed over."""
    if not target.exists():
        os.replace(draft, target)
        return
    with _beside(target.with_name(f"{target.name}.old")) as old:
        os.replace(target, old)
        try:
            os.replace(draft, target)
        except OSError:
            os.replace(old, target)
            raise


def _download(uri: str) -> Path:
    """The folder of a registered policy, fetched to a temporary place."""
    try:
        import mlflow.artifacts
        import mlflow.exceptions
    except ImportError:
        raise InputError(f"{uri}: needs MLflow, which is not installed (pip install 'lorazor[training]')") from None
    try:
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri))
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise InputError(f"{uri}: MLflow cannot fetch it ({str(error).splitlines()[0]})") from None
    found = sorted(folder.rglob(POLICY_FILE))
    if len(found) != 1:
        raise InputError(f"{uri}: must hold one {POLICY_FILE}, has {len(found)}")
    return found[0].parent
