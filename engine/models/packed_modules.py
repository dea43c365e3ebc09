"""nn.Linear and nn.Embedding over packed weights; they stand in transformers' models in their place.

Knows neither files nor how the operators compute.
"""

from typing import Any

import torch
from torch import nn

from headway.kernels.choices import Activations
from headway.kernels.cpu.library import Team
from headway.kernels.linear import QuantisedRows, quantise_rows
from headway.kernels.linear import linear as native_linear
from headway.kernels.memory import drop_file_pages
from headway.kernels.ops import embedding, linear
from headway.kernels.packed import FORMATS, PackedWeight


class PackedLinear(nn.Module):
    """y = x W^T + b; W is read only."""

    data: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weight: PackedWeight, bias: torch.Tensor | None, activations: Activations
    ) -> None:
        super().__init__()
        self.format = weight.format
        self.in_features = weight.num_inputs
        self.out_features = weight.num_outputs
        self.activations = activations
        self.team: Team | None = None
        """Threads for the native product; without them, and while a graph is captured, the operator."""
        self.register_buffer("data", weight.data)
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> PackedWeight:
        """The matrix; its memory is this module's."""
        return PackedWeight(self.format, self.out_features, self.in_features, self.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs] -> [..., outputs], of x's dtype."""
        if self.team is not None and not torch.compiler.is_exporting():
            return self._native(x, self.team)
        return linear(
            x,
            self.data,
            self.format,
            self.out_features,
            self.in_features,
            self.bias,
            self.activations,
        )

    def _native(self, x: torch.Tensor, team: Team) -> torch.Tensor:
        rows: torch.Tensor | QuantisedRows = x.reshape(-1, self.in_features).float().contiguous()
        if self.activations == "int8" and FORMATS[self.format].scale_bytes:
            assert isinstance(rows, torch.Tensor)
            rows = quantise_rows(rows, team=team)
        y = native_linear(rows, self.weight, bias=self.bias, team=team)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        """Say what print() shows."""
        return f"{self.in_features}, {self.out_features}, {self.format}, {self.activations}"


class PackedEmbedding(nn.Module):
    """Rows of a packed matrix; multiplied by `scale`, as Gemma does with its embeddings."""

    data: torch.Tensor

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.format = weight.format
        self.num_embeddings = weight.num_outputs
        self.embedding_dim = weight.num_inputs
        self.dtype = dtype
        # Rounded to the dtype, as transformers does with its own.
        self.scale = torch.tensor(scale, dtype=dtype).item()
        self.register_buffer("data", weight.data)

    @property
    def weight(self) -> PackedWeight:
        """The matrix; its memory is this module's."""
        return PackedWeight(self.format, self.num_embeddings, self.embedding_dim, self.data)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [...] int64 -> [..., size] of `dtype`."""
        rows = embedding(token_ids, self.data, self.format, self.num_embeddings, self.embedding_dim)
        if self.dtype != torch.float32:
            rows = rows.to(self.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    def extra_repr(self) -> str:
        """Say what print() shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"


def use_team(model: nn.Module, team: Team | None) -> None:
    """Have every packed product of a model computed by the native kernels."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.team = team


def rounds_inputs(model: nn.Module) -> bool:
    """Whether a model has products that round their inputs to int8."""
    return any(
        isinstance(module, PackedLinear)
        and module.activations == "int8"
        and FORMATS[module.format].scale_bytes > 0
        for module in model.modules()
    )


def drop_pages(model: nn.Module) -> None:
    """Give back what a model's packed weights take in memory, where a file holds them.

    For a model whose compiled pass has copies of its own: the modules are run seldom, if ever.
    """
    packed = (PackedLinear, PackedEmbedding)
    drop_file_pages([module.data for module in model.modules() if isinstance(module, packed)])


def embedding_scale(module: nn.Embedding) -> float | None:
    """Return what an embedding multiplies its rows by, or None if it does more than PackedEmbedding.

    transformers has classes of embeddings that scale, and says by what in `scalar_embed_scale`.
    """
    if type(module) is nn.Embedding:
        return 1.0 if module.max_norm is None else None
    if not type(module).__name__.endswith("ScaledWordEmbedding"):
        return None
    scale: Any = getattr(module, "scalar_embed_scale", None)
    return None if scale is None else float(scale)
