"""Any name of a model -> its weights in memory, in transformers' own class.

Does not know how the model will be run: attention is a name that the caller registered.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from headway.engine.config import Quantize
from headway.engine.errors import ModelLoadError, first_line
from headway.engine.machine import free_bytes
from headway.engine.models.build_model import build_model
from headway.engine.models.cache import Progress, no_progress
from headway.engine.models.convert import convert_gguf
from headway.engine.models.pack_model import PackedModel, pack_folder, pack_gguf
from headway.engine.models.store import resolve
from headway.kernels.choices import Activations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: no gradients, evaluation mode, weights on their device."""

    name: str
    """As the caller named it."""
    path: Path
    """The Hugging Face folder that it came from; its tokenizer is there."""
    model: PreTrainedModel
    config: PreTrainedConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer; empty if the model names none."""


def load_model(
    name_or_path: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    attention: str = "sdpa",
    quantize: Quantize = "none",
    activations: Activations = "int8",
    keep_packed: bool = True,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Load a model by any name that store.resolve takes.

    On a CPU quantised weights stay packed, and `quantize` packs float ones. `activations` says what
    their products do to inputs; models of floats do not look at it. With keep_packed=False, and on
    other devices, quantised weights are expanded to `dtype`: gradients need that. `attention` is a
    name in transformers' AttentionInterface.

    Raises:
        ModelLoadError: the model cannot be found, read, converted, packed or held in memory.
    """
    device = torch.device(device)
    keep_packed = keep_packed and device.type == "cpu"
    if quantize != "none" and not keep_packed:
        raise ModelLoadError(
            f"quantize is {quantize}, and the device is {device}: weights are packed for CPUs alone. "
            "Leave quantize out, or set the device to cpu."
        )
    path = resolve(name_or_path, progress)
    packed = pack_weights(path, quantize, progress) if keep_packed else None
    if packed is not None:
        folder = packed.folder
        with _advice_for(folder, path):
            model = _build_packed(packed, dtype, attention, activations, progress)
    else:
        folder = convert_gguf(path, progress) if path.is_file() else path
        with _advice_for(folder, path):
            model = _load_floats(folder, dtype, attention, device, progress)
    return LoadedModel(
        name=name_or_path,
        path=folder,
        model=model,
        config=model.config,
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(folder, model.generation_config, model.config),
    )


def pack_weights(
    path: Path, quantize: Quantize = "none", progress: Progress = no_progress
) -> PackedModel | None:
    """Return the packed weights of a GGUF file or a folder; None if it has none and is to have none.

    Raises:
        ModelLoadError: the model cannot be read, packed or stored.
    """
    if path.is_file():
        return pack_gguf(path, quantize, progress)
    if quantize == "none":
        return None
    config = _read_config(path)
    _num_weights(path)
    own_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    read_floats = partial(_read_model, path, config, own_dtype, "eager", torch.device("cpu"))
    return pack_folder(path, quantize, config, read_floats, progress)


def _build_packed(
    packed: PackedModel,
    dtype: torch.dtype,
    attention: str,
    activations: Activations,
    progress: Progress,
) -> PreTrainedModel:
    config = _read_config(packed.folder)
    num_bytes = packed.file.stat().st_size
    _check_memory(packed.folder, num_bytes, torch.device("cpu"))
    progress("load", 0, num_bytes)
    with _quiet_transformers():
        model = build_model(config, packed.weights, dtype, attention, activations)
        if (packed.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(packed.folder)
    progress("load", num_bytes, num_bytes)
    return model


def _load_floats(
    folder: Path, dtype: torch.dtype, attention: str, device: torch.device, progress: Progress
) -> PreTrainedModel:
    config = _read_config(folder)
    num_bytes = _num_weights(folder) * dtype.itemsize
    _check_memory(folder, num_bytes, device)
    progress("load", 0, num_bytes)
    model = _read_model(folder, config, dtype, attention, device)
    progress("load", num_bytes, num_bytes)
    return model


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers divides by, looks up and imports what the file says
        raise ModelLoadError(
            f"{folder}/config.json cannot be used: {first_line(error)} Models that need code of "
            "their own cannot be loaded."
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"{folder} holds a model of type {config.model_type!r}, which does not generate text. "
            "Give a causal language model, such as Llama, Qwen or Gemma 3."
        )
    if (num_layers := config.get_text_config().num_hidden_layers) < 1:
        raise ModelLoadError(
            f"num_hidden_layers in {folder}/config.json is {num_layers}; it must be at least 1. "
            "Correct it."
        )
    return config


def _num_weights(folder: Path) -> int:
    """Count the values in the folder's safetensors, reading nothing but their headers."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelLoadError(
            f"{folder} has no .safetensors file. Other formats are not read, because loading them "
            "can run code: convert the model with transformers' save_pretrained."
        )
    total = 0
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                keys = file.keys()
                total += sum(math.prod(file.get_slice(key).get_shape()) for key in keys)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} is not a whole safetensors file: {first_line(error)} Download it again."
            ) from error
    return total


def _check_memory(folder: Path, num_bytes: int, device: torch.device) -> None:
    num_free = free_bytes(device)
    if num_bytes > num_free:
        raise ModelLoadError(
            f"the weights of {folder} need {num_bytes / 1e9:.1f} GB on {device} and "
            f"{num_free / 1e9:.1f} GB are free. Take a smaller model or a 16-bit dtype, or free "
            "memory."
        )


def _read_model(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, attention: str, device: torch.device
) -> PreTrainedModel:
    try:
        with _quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and refused below
            )
        model: PreTrainedModel = loaded[0].to(device)
    except Exception as error:  # as above, and what torch makes of sizes that fit no memory
        raise ModelLoadError(
            f"{folder} cannot be loaded with dtype {dtype} on {device}: {first_line(error)} Check "
            "its config.json, the device and the memory."
        ) from error
    _check_report(folder, loaded[1])
    model.train(False)
    model.requires_grad_(False)
    return model


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse a model of which from_pretrained found only a part, or parts of another size."""
    if wrong := sorted(report["mismatched_keys"]):
        name, found, expected = wrong[0]
        raise ModelLoadError(
            f"{folder} has {len(wrong)} weights of another shape than its config.json says, among "
            f"them {name}: {tuple(found)}, not {tuple(expected)}. Take both from one place."
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of the model's weights, among them {missing[:3]}. "
            "Download it again, and all of its .safetensors files."
        )
    unexpected = sorted(report["unexpected_keys"])
    if layers := [name for name in unexpected if name.startswith("model.layers.")]:
        raise ModelLoadError(
            f"{folder} has {len(layers)} weights of layers for which its config.json has no place, "
            f"among them {layers[:3]}. Take both from one place."
        )
    if unexpected:
        logger.warning(
            "weights without a place in the model: folder=%s keys=%s", folder, unexpected
        )


@contextmanager
def _advice_for(folder: Path, path: Path) -> Iterator[None]:
    """Tell how to mend a conversion: nobody downloaded it, and the cache would keep it as it is."""
    try:
        yield
    except ModelLoadError as error:
        if folder == path:
            raise
        raise ModelLoadError(
            f"{error} The folder was made from {path}: remove it, and it is made anew."
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and advice off the terminal: the caller has its own progress."""
    log: Any = transformers.utils.logging  # its functions are not typed
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _eos_token_ids(
    folder: Path, generation: GenerationConfig | None, config: PreTrainedConfig
) -> tuple[int, ...]:
    ids = generation.eos_token_id if generation else None
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        return ()
    found = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(isinstance(token_id, int) for token_id in found):
        raise ModelLoadError(
            f"eos_token_id in {folder}/generation_config.json or config.json is {ids!r}; a token id or "
            "a list of them is allowed. Correct it."
        )
    return found
