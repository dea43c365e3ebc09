"""GGUF files as Hugging Face folders, made once and kept in the cache.

Knows neither how a GGUF file is laid out (gguf_file.py) nor what its keys mean (architectures.py).
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedConfig

from headway.engine.models.architectures import build_config, match_tensors, read_parameter
from headway.engine.models.cache import Progress, ensure_folder, no_progress
from headway.engine.models.gguf_file import GGUFFile, open_gguf
from headway.engine.models.tokenizer import save_gguf_tokenizer
from headway.kernels.cache import cache_folder

# Part of the key: raise it when what is written changes, and old folders are not read any more.
_FORMAT = 1
_SHARD_BYTES = 2 << 30


def convert_gguf(path: Path, progress: Progress = no_progress) -> Path:
    """Return the Hugging Face folder made from a GGUF file, making it if it is not in the cache.

    Weights keep every bit: F16 and BF16 tensors as they are, quantised ones as float32.

    Raises:
        ModelLoadError: the file is damaged or of a kind that cannot be read, or the disk is full.
    """
    folder = converted_folder(path)
    if folder.is_dir():
        return folder
    file = open_gguf(path)
    config = build_config(file)
    names = match_tensors(file, config)
    num_values = sum(torch.Size(file.tensors[name].shape).numel() for name in names.values())

    def fill(staging: Path) -> None:
        _write_weights(staging, _parameters(file, config, names, progress))
        write_papers(staging, file, config)

    return ensure_folder(folder, 4 * num_values, fill)


def converted_folder(path: Path) -> Path:
    """Return where the conversion of this file is kept; a file that changes gets another place."""
    return keyed_folder("converted", path, [path], _FORMAT)


def keyed_folder(kind: str, source: Path, files: Sequence[Path], *settings: object) -> Path:
    """Return the cache's folder for what is made of `files`, told apart by their sizes and times."""
    stats = [(path.name, path.stat()) for path in files]
    parts = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    identity = " ".join([str(source.resolve()), *parts, *map(str, settings)])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    stem = source.stem if source.is_file() else source.name
    return cache_folder() / kind / f"{stem}-{key}"


def write_papers(folder: Path, file: GGUFFile, config: PreTrainedConfig) -> None:
    """Write all of a Hugging Face folder but the weights: configs, and the tokenizer if there is one."""
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    if "tokenizer.ggml.model" in file.metadata:
        save_gguf_tokenizer(file, folder)


def _parameters(
    file: GGUFFile, config: PreTrainedConfig, names: dict[str, str], progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    total_bytes = sum(file.tensors[name].blocks.nbytes for name in names.values())
    done_bytes = 0
    for parameter, name in names.items():
        yield parameter, read_parameter(file, config, parameter, name).contiguous()
        done_bytes += file.tensors[name].blocks.nbytes
        progress("convert", done_bytes, total_bytes)


def _write_weights(folder: Path, parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write safetensors of some 2 GiB each, so that no more than one of them is in memory."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, value in parameters:
        if held and sum(kept.nbytes for kept in held.values()) + value.nbytes > _SHARD_BYTES:
            flush()
        held[name] = value
    flush()
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{index}.safetensors").rename(folder / file_name)
        weight_map |= dict.fromkeys(shard, file_name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
