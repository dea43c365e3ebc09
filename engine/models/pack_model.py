"""Which weights of a model are packed and how, and the cache of what was packed.

Quantised tensors of GGUF files keep their codes; float matrices are rounded where `quantize` says
so. Norms, biases and all that is no matrix stay floats. Does not build models.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headway.engine.config import Quantize
from headway.engine.errors import ModelLoadError
from headway.engine.models.architectures import (
    build_config,
    match_tensors,
    read_blocks,
    read_parameter,
)
from headway.engine.models.build_model import empty_model, packable_weights, tied_weight
from headway.engine.models.cache import Progress, ensure_folder, no_progress
from headway.engine.models.convert import keyed_folder, write_papers
from headway.engine.models.gguf_file import GGUFFile, open_gguf
from headway.engine.models.packed_file import PlannedWeight, Weight, read_weights, write_weights
from headway.kernels.gguf_blocks import BLOCK_TYPES, pack_blocks
from headway.kernels.pack import pack
from headway.kernels.packed import FormatName, PackedWeight

logger = logging.getLogger(__name__)

_WEIGHTS_FILE = "packed.safetensors"
# Part of the key: raise it when what is written changes.
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PackedModel:
    """What a model is built from."""

    folder: Path
    """With config.json and the tokenizer."""
    file: Path
    weights: Mapping[str, Weight]
    """By the parameters' names; views of the file."""

    @property
    def formats(self) -> Counter[str]:
        """How many matrices are packed in each format."""
        return Counter(
            each.format for each in self.weights.values() if isinstance(each, PackedWeight)
        )

    @property
    def num_weights(self) -> int:
        """Values of all weights; a tied head counts once."""
        return sum(
            each.num_outputs * each.num_inputs if isinstance(each, PackedWeight) else each.numel()
            for each in self.weights.values()
        )


def pack_gguf(
    path: Path, quantize: Quantize = "none", progress: Progress = no_progress
) -> PackedModel | None:
    """Return the packed weights of a GGUF file; None if all of them are floats that stay floats.

    Raises:
        ModelLoadError: the file is damaged or cannot be read, there is nothing left to quantise, or
            the disk is full.
    """
    folder = keyed_folder("packed", path, [path], quantize, _FORMAT)

    def ensure() -> bool:
        if folder.is_dir():
            return True
        file = open_gguf(path)
        config = build_config(file)
        plan = _plan_gguf(file, config, quantize)
        if not any(isinstance(planned.kind, str) for planned in plan.values()):
            return False

        def fill(staging: Path) -> None:
            write_papers(staging, file, config)
            write_weights(staging / _WEIGHTS_FILE, plan, progress)

        ensure_folder(folder, _num_bytes(plan), fill)
        return True

    if not ensure():
        return None
    file = folder / _WEIGHTS_FILE
    return PackedModel(folder, file, _read_or_remake(file, ensure))


def pack_folder(
    path: Path,
    quantize: Quantize,
    config: PreTrainedConfig,
    read_floats: Callable[[], PreTrainedModel],
    progress: Progress = no_progress,
) -> PackedModel:
    """Return the weights of a Hugging Face folder, quantised.

    The folder's tensors are read one by one where they have the names of the model's parameters.
    Where they have others, `read_floats` is called, which loads the whole model.

    Raises:
        ModelLoadError: the weights cannot be read or rounded, or the disk is full.
    """
    files = sorted(path.glob("*.safetensors"))
    folder = keyed_folder("packed", path, [path / "config.json", *files], quantize, _FORMAT)

    def ensure() -> None:
        if folder.is_dir():
            return
        plan = _plan_floats(path, _tensors(files, config, read_floats), config, quantize)
        ensure_folder(
            folder,
            _num_bytes(plan),
            lambda staging: write_weights(staging / _WEIGHTS_FILE, plan, progress),
        )

    ensure()
    file = folder / _WEIGHTS_FILE
    return PackedModel(path, file, _read_or_remake(file, ensure))


def _read_or_remake(file: Path, ensure: Callable[[], object]) -> dict[str, Weight]:
    try:
        return read_weights(file)
    except ModelLoadError as error:
        logger.warning("packed weights are made again: error=%s", error)
        shutil.rmtree(file.parent, ignore_errors=True)
        ensure()
        return read_weights(file)


def _num_bytes(plan: Mapping[str, PlannedWeight]) -> int:
    return sum(planned.num_bytes for planned in plan.values())


def _plan_gguf(
    file: GGUFFile, config: PreTrainedConfig, quantize: Quantize
) -> dict[str, PlannedWeight]:
    names = match_tensors(file, config)
    model = empty_model(config)
    packable, rounded = packable_weights(model), _rounded(model, quantize)
    plan: dict[str, PlannedWeight] = {}
    for parameter, name in names.items():
        kind, shape = file.tensors[name].type.name, file.tensors[name].shape
        # The order of the arguments is that of read_blocks and read_parameter.
        place = (file, config, parameter, name)
        if parameter in packable and kind in BLOCK_TYPES:
            make: Callable[[], Weight] = partial(_pack_blocks, *place)
            plan[parameter] = PlannedWeight(shape, BLOCK_TYPES[kind].format, make)
        elif parameter in rounded:
            make = partial(_round, file.path, parameter, partial(read_parameter, *place), rounded)
            plan[parameter] = PlannedWeight(shape, rounded[parameter], make)
        else:
            make = partial(_read_float32, *place)
            plan[parameter] = PlannedWeight(shape, torch.float32, make)
    kinds = {file.tensors[name].type.name for name in names.values()}
    if quantize != "none" and not any(
        parameter in rounded and file.tensors[name].type.name not in BLOCK_TYPES
        for parameter, name in names.items()
    ):
        raise ModelLoadError(
            f"quantize is {quantize}, and every matrix of {file.path} is quantised already "
            f"({', '.join(sorted(kinds & BLOCK_TYPES.keys()))}). Leave it out, or give the model's "
            "float checkpoint."
        )
    return plan


def _plan_floats(
    path: Path, tensors: Mapping[str, torch.Tensor], config: PreTrainedConfig, quantize: Quantize
) -> dict[str, PlannedWeight]:
    rounded = _rounded(empty_model(config), quantize)

    def planned(name: str, value: torch.Tensor) -> PlannedWeight:
        shape = tuple(value.shape)
        if name in rounded:
            make = partial(_round, path, name, lambda: value, rounded)
            return PlannedWeight(shape, rounded[name], make)
        return PlannedWeight(shape, value.dtype, lambda: value)

    return {name: planned(name, value) for name, value in tensors.items()}


def _rounded(model: PreTrainedModel, quantize: Quantize) -> dict[str, FormatName]:
    """Which weights `quantize` packs, and how.

    int4 leaves eight bits to the embedding and the output head, as quantised GGUF files do: their
    errors reach the logits directly.
    """
    if quantize == "none":
        return {}
    untyped: Any = model
    head = untyped.get_output_embeddings()
    return {
        name: "q8"
        if quantize == "int8" or isinstance(each, nn.Embedding) or each is head
        else "q4_1"
        for name, each in packable_weights(model).items()
    }


def _tensors(
    files: list[Path], config: PreTrainedConfig, read_floats: Callable[[], PreTrainedModel]
) -> dict[str, torch.Tensor]:
    """Return the folder's tensors by the parameters' names, as views of its files if they will do."""
    model = empty_model(config)
    tied = tied_weight(model)
    found: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    head = found.pop(tied or "", None)
    if head is not None and not any(
        value.shape == head.shape and torch.equal(value, head) for value in found.values()
    ):
        raise ModelLoadError(
            f"{files[0].parent}: config.json says that the output head is the embedding "
            f"(tie_word_embeddings), and {tied} is another matrix. Correct one of them."
        )
    expected = {name: value.shape for name, value in model.state_dict().items() if name != tied}
    if {name: value.shape for name, value in found.items()} == expected:
        return found
    return {name: value for name, value in read_floats().state_dict().items() if name != tied}


def _pack_blocks(
    file: GGUFFile, config: PreTrainedConfig, parameter: str, name: str
) -> PackedWeight:
    return pack_blocks(read_blocks(file, config, parameter, name), file.tensors[name].type.name)


def _read_float32(
    file: GGUFFile, config: PreTrainedConfig, parameter: str, name: str
) -> torch.Tensor:
    return read_parameter(file, config, parameter, name).float()


def _round(
    path: Path, name: str, read: Callable[[], torch.Tensor], rounded: Mapping[str, FormatName]
) -> PackedWeight:
    try:
        return pack(read(), rounded[name])
    except ValueError as error:
        raise ModelLoadError(f"{name} of {path} cannot be quantised: {error}") from error
