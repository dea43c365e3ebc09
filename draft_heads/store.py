"""A folder of draft heads on disk: config.json and model.safetensors.

    config.json        {"format_version": 1, "model_type": "hydra", "weights_sha256": ...,
                        "num_heads": 4, "hidden_size": 576, "vocab_size": 49152,
                        "tree": [[0], [0, 0]], "own_output_heads": false,
                        "target": {"name", "architecture", "num_layers"}, "training": {...}}
    model.safetensors  the heads' parameters, `target_sketch` and, for heads that draft some tokens
                       alone, `draft_ids`, int64, ascending

Other families of heads get other values of model_type and their own fields; the rest stays.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headway.draft_heads.config import HydraConfig
from headway.draft_heads.hydra import HydraHeads, TargetEnds
from headway.draft_heads.tree_shape import TreeShape
from headway.engine.errors import ModelLoadError

FORMAT_VERSION = 1
MODEL_TYPE = "hydra"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SKETCH = "target_sketch"
DRAFT_IDS = "draft_ids"
"""As HydraHeads names its buffer."""


def save_heads(
    folder: Path, heads: HydraHeads, model: Any, target_name: str, training: Mapping[str, object]
) -> None:
    """Write heads for `model`, over older ones if there are any.

    Both files are written in full beside their places before either is moved: a full disk leaves
    the older heads whole. A crash between the two moves leaves a pair that load_heads refuses.
    """
    config = heads.config
    tensors = {name: tensor.contiguous() for name, tensor in heads.state_dict().items()}
    weights = save({**tensors, SKETCH: target_sketch(model)})
    record = {
        "format_version": FORMAT_VERSION,
        "model_type": MODEL_TYPE,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "num_heads": config.num_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tree": config.tree.paths,
        "own_output_heads": config.own_output_heads,
        "target": {"name": target_name, **_architecture(model)},
        "training": dict(training),
    }
    folder.mkdir(parents=True, exist_ok=True)
    contents = {WEIGHTS_FILE: weights, CONFIG_FILE: json.dumps(record, indent=2).encode()}
    parts = {folder / f".{name}.part": folder / name for name in contents}
    try:
        for part, content in zip(parts, contents.values(), strict=True):
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for part, place in parts.items():
            part.replace(place)
    finally:
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()


def load_heads(folder: Path, model: Any) -> HydraHeads:
    """Read the heads in `folder` for the transformers model `model`, in its dtype, on its device.

    Raises ModelLoadError where a file is missing, damaged or of another version, or where the heads
    were trained for another model.
    """
    record = read_record(folder)
    weights = _read_bytes(folder / WEIGHTS_FILE)
    if hashlib.sha256(weights).hexdigest() != record.get("weights_sha256"):
        raise ModelLoadError(
            f"{folder / WEIGHTS_FILE}: is not the file that {CONFIG_FILE} was written with "
            f"({len(weights)} bytes, weights_sha256 differs); copy or train the heads again"
        )
    try:
        tensors = load(weights)
        config = _config_of(record)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder}: damaged heads: {error}; train them again") from error
    _check_target(folder, record, config, tensors.pop(SKETCH, None), model)
    try:
        heads = HydraHeads(config, TargetEnds.of(model), tensors.get(DRAFT_IDS))
        heads.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise ModelLoadError(f"{folder}: the tensors do not fit {CONFIG_FILE}: {error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{folder}: {error}; copy or train the heads again") from error
    return heads.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"{path}: cannot be read: {error.strerror}; a folder of draft heads holds "
            f"{CONFIG_FILE} and {WEIGHTS_FILE}, as `headway heads train` writes them"
        ) from error


def read_record(folder: Path) -> dict[str, Any]:
    """Return what the folder's config.json holds. Raises ModelLoadError."""
    path = folder / CONFIG_FILE
    try:
        record = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path}: is not JSON: {error}; copy or train the heads again"
        ) from error
    if not isinstance(record, dict) or record.get("model_type") != MODEL_TYPE:
        found = record.get("model_type") if isinstance(record, dict) else record
        raise ModelLoadError(
            f'{path}: model_type is {found!r}, not "{MODEL_TYPE}": these are no draft heads that '
            "this version knows"
        )
    if record.get("format_version") != FORMAT_VERSION:
        raise ModelLoadError(
            f"{path}: format_version is {record.get('format_version')!r}; this version reads "
            f"{FORMAT_VERSION}; train the heads again or take the Headway that wrote them"
        )
    return record


def _config_of(record: Mapping[str, Any]) -> HydraConfig:
    return HydraConfig(
        hidden_size=record["hidden_size"],
        vocab_size=record["vocab_size"],
        num_heads=record["num_heads"],
        tree=TreeShape.of(record["tree"]),
        own_output_heads=record["own_output_heads"],
    )


def target_sketch(model: Any) -> Tensor:
    """Take 256 numbers, float32, that tell one model's weights from another's.

    They are four places in the embeddings of 64 tokens spread over the vocabulary: readable however
    the weights are held, and equal within rounding whatever the dtype. A model that was tuned with
    its embeddings frozen has the same sketch; heads still work for it, if less well.
    """
    ends = TargetEnds.of(model)
    text = model.config.get_text_config()
    ids = torch.linspace(0, text.vocab_size - 1, 64).long().to(ends.device)
    places = torch.linspace(0, text.hidden_size - 1, 4).long().to(ends.device)
    with torch.no_grad():
        embeddings: Tensor = ends.embed(ids)
    return embeddings[:, places].flatten().float().cpu()


def _architecture(model: Any) -> dict[str, object]:
    return {
        "architecture": type(model).__name__,
        "num_layers": model.config.get_text_config().num_hidden_layers,
    }


def _check_target(
    folder: Path, record: Mapping[str, Any], config: HydraConfig, sketch: Tensor | None, model: Any
) -> None:
    text = model.config.get_text_config()
    target = record.get("target")
    target = target if isinstance(target, dict) else {}
    trained = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "architecture": target.get("architecture"),
        "num_layers": target.get("num_layers"),
    }
    served = {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        **_architecture(model),
    }
    problems = [
        f"{key} {trained[key]} against {served[key]}"
        for key in served
        if trained[key] != served[key]
    ]
    # bfloat16 rounds by 1/256 at most; the absolute part forgives what float16 flushes to zero.
    if not problems and (
        sketch is None
        or not torch.allclose(sketch.float(), target_sketch(model), rtol=1 / 64, atol=1e-5)
    ):
        problems = ["the weights differ (embeddings of 64 sampled tokens)"]
    if problems:
        raise ModelLoadError(
            f"{folder}: these heads were trained for {target.get('name')!r}, another model than "
            f"the one being served: {'; '.join(problems)}; serve that model or train heads for this"
        )
