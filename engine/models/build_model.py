"""transformers' model around weights that are already in memory: nothing is made twice.

Knows no files. Float weights become parameters; packed ones, modules of packed_modules.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from headway.engine.errors import ModelLoadError
from headway.engine.models.packed_file import Weight
from headway.engine.models.packed_modules import PackedEmbedding, PackedLinear, embedding_scale
from headway.kernels.choices import Activations
from headway.kernels.packed import PackedWeight


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> PreTrainedModel:
    """Return the model's class with weights that take no memory and have no values."""
    untyped: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = untyped.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model


def packable_weights(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return {name of a weight: its module} for every matrix that a packed module can stand in for."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        or (isinstance(module, nn.Embedding) and embedding_scale(module) is not None)
    }


def tied_weight(model: PreTrainedModel) -> str | None:
    """Return the name of the output head's weight if it is the embedding's, else None."""
    untyped: Any = model
    if not getattr(model.config, "tie_word_embeddings", False):
        return None
    head = untyped.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def build_model(
    config: PreTrainedConfig,
    weights: Mapping[str, Weight],
    dtype: torch.dtype,
    attention: str,
    activations: Activations,
) -> PreTrainedModel:
    """Return the model with these weights: packed ones as they are, floats in `dtype`.

    A tied output head shares the embedding's memory.

    Raises:
        ModelLoadError: the weights are not all that the model needs, or it has state that its class
            does not set up.
    """
    model = empty_model(config, dtype, attention)
    packable = packable_weights(model)
    for name, weight in weights.items():
        parent, leaf = _place(model, name)
        if isinstance(weight, PackedWeight):
            bias = weights.get(f"{name.removesuffix('.weight')}.bias")
            assert bias is None or isinstance(bias, torch.Tensor)
            module = _packed_module(packable[name], weight, bias, dtype, activations)
            _replace(model, name.removesuffix(".weight"), module)
        elif isinstance(parent, PackedLinear):
            continue  # its bias, which it has
        elif leaf in parent._parameters:
            value = weight.to(dtype) if weight.is_floating_point() else weight
            setattr(parent, leaf, nn.Parameter(value, requires_grad=False))
        elif leaf in parent._buffers:
            setattr(parent, leaf, weight)
    if (tied := tied_weight(model)) is not None:
        _tie(model, tied, activations)
    _set_up_buffers(model)
    left = [name for name, value in _values(model).items() if value.is_meta]
    if left:
        raise ModelLoadError(
            f"{len(left)} weights of {type(model).__name__} are missing, among them {left[:3]}. Take "
            "the model's files from one place, and all of them."
        )
    model.train(False)
    return model


def _packed_module(
    module: nn.Module,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    activations: Activations,
) -> nn.Module:
    if isinstance(module, nn.Embedding):
        scale = embedding_scale(module)
        assert scale is not None
        return PackedEmbedding(weight, dtype, scale)
    return PackedLinear(weight, None if bias is None else bias.to(dtype), activations)


def _tie(model: PreTrainedModel, name: str, activations: Activations) -> None:
    untyped: Any = model
    embedding = untyped.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        head = PackedLinear(embedding.weight, None, activations)
        _replace(model, name.removesuffix(".weight"), head)
    else:
        untyped.get_output_embeddings().weight = embedding.weight


def _set_up_buffers(model: PreTrainedModel) -> None:
    """Let the class fill buffers that no file holds, such as rotary frequencies.

    transformers does the same with what a checkpoint lacks. NaN shows what it did not fill.
    """
    untyped: Any = model
    for module in model.modules():
        names = [name for name, value in module.named_buffers(recurse=False) if value.is_meta]
        for name in names:
            shape, dtype = module._buffers[name].shape, module._buffers[name].dtype  # type: ignore[union-attr]  # named above
            fill = math.nan if dtype.is_floating_point else 0
            module._buffers[name] = torch.full(shape, fill, dtype=dtype)
        if names:
            untyped._init_weights(module)
        for name in names:
            value = module._buffers[name]
            if value is not None and value.isnan().any():
                raise ModelLoadError(
                    f"{type(module).__name__} of {type(model).__name__} does not set up its {name}, "
                    "so the model cannot be packed. Give it as a Hugging Face folder, without quantize."
                )


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, leaf = _place(model, name)
    setattr(parent, leaf, module)
