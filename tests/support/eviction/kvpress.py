"""What kvpress keeps of some prompts, as recorded by ``tests.support.eviction.kvpress_fixtures``. Needs no kvpress.

A case is one random checkpoint and one prompt. Its keys and queries do not depend on the press: kvpress computes the
whole prompt with full attention and only then drops K and V.
"""

import hashlib
import io
import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).resolve().parents[2] / "cpu" / "eviction" / "data"
"""Where the fixtures are: ``kvpress-<case>.npz``."""


@dataclass(frozen=True)
class Run:
    """One press with one set of parameters, by kvpress's own names.

    ``kept`` is bool ``[layers, kv_heads, tokens]``. ``scores`` are float32 of the same shape, larger ones stay; None
    where a press has no scores.
    """

    press: str
    parameters: dict[str, Any]
    kept: Tensor
    scores: Tensor | None

    def __str__(self) -> str:
        return "-".join([self.press, *(f"{name}={value}" for name, value in self.parameters.items())])

    @property
    def num_kept(self) -> Tensor:
        """Tokens kept by each lane, int64 ``[layers, kv_heads]``."""
        return self.kept.sum(-1)


@dataclass(frozen=True)
class Recipe:
    """What makes a case's checkpoint and prompt again: the arguments of ``make_checkpoint``, SHA-256 of the weights it
    gives, and the prompt. ``versions`` are those of the packages that the case was recorded with."""

    seed: int
    overrides: dict[str, Any]
    weights_sha256: str
    prompt_ids: list[int]
    versions: dict[str, str]


@dataclass(frozen=True)
class Case:
    """A checkpoint, a prompt and what each press keeps of it; all in float32.

    ``keys`` ``[layers, kv_heads, tokens, head_dim]`` and ``queries`` ``[layers, heads, last tokens, head_dim]`` are
    rotated; ``value_norms`` is ``[layers, kv_heads, tokens]``.
    """

    name: str
    recipe: Recipe
    keys: Tensor
    queries: Tensor
    value_norms: Tensor
    runs: tuple[Run, ...]

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    def of(self, press: str) -> list[Run]:
        """The runs of one press."""
        return [run for run in self.runs if run.press == press]


def weights_sha256(checkpoint: Path) -> str:
    """Return the digest of a single-file checkpoint's names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def save_case(case: Case, folder: Path = DATA) -> Path:
    """Write ``kvpress-<name>.npz``; scores that several runs share are written once."""
    shared: dict[bytes, int] = {}
    arrays: dict[str, np.ndarray] = {}
    runs = []
    for index, run in enumerate(case.runs):
        arrays[f"kept.{index}"] = np.packbits(run.kept.numpy(), axis=-1)
        scores = None
        if run.scores is not None:
            scores = shared.setdefault(run.scores.numpy().tobytes(), len(shared))
            arrays[f"scores.{scores}"] = run.scores.numpy()
        runs.append({"press": run.press, "parameters": run.parameters, "scores": scores})
    arrays |= {name: getattr(case, name).numpy() for name in ("keys", "queries", "value_norms")}
    arrays["about"] = np.array(json.dumps({"recipe": asdict(case.recipe), "runs": runs}))
    path = folder / f"kvpress-{case.name}.npz"
    with zipfile.ZipFile(path, "w") as file:
        for part, array in arrays.items():
            content = io.BytesIO()
            np.save(content, _planes(array))
            file.writestr(zipfile.ZipInfo(f"{part}.npy"), content.getvalue(), zipfile.ZIP_LZMA)
    return path


def _planes(array: np.ndarray) -> np.ndarray:
    """float32 as uint8 ``[4, ...]``, the bytes of a number apart, which takes less room; others as they are."""
    return np.moveaxis(array[..., None].view(np.uint8), -1, 0) if array.dtype == np.float32 else array


def _float32(planes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(planes, 0, -1)).view(np.float32)[..., 0])


def load_case(name: str) -> Case:
    """Read ``kvpress-<name>.npz``."""
    with np.load(DATA / f"kvpress-{name}.npz", allow_pickle=False) as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"]))
    keys, queries, value_norms = (_float32(arrays[part]) for part in ("keys", "queries", "value_norms"))
    num_tokens = keys.shape[2]
    runs = []
    for index, run in enumerate(about["runs"]):
        kept = np.unpackbits(arrays[f"kept.{index}"], axis=-1, count=num_tokens).astype(bool)
        scores = None if run["scores"] is None else _float32(arrays[f"scores.{run['scores']}"])
        runs.append(Run(run["press"], run["parameters"], torch.from_numpy(kept), scores))
    return Case(name, Recipe(**about["recipe"]), keys, queries, value_norms, tuple(runs))


def case_names() -> list[str]:
    """The names of all recorded cases."""
    return sorted(path.stem.removeprefix("kvpress-") for path in DATA.glob("kvpress-*.npz"))
