"""The contracts as torch operators, so that a captured graph shows each as one node.

    headway::linear     activations times a packed weight
    headway::embedding  rows of a packed weight
    headway::attention  keys and values into the paged cache, then attention to it

What each takes is told by the function behind it. They are defined by schema, because a call costs
20 microseconds with torch.library.custom_op and an argument that is mutated, and 5 so. They have no
gradients: a model that is trained has float weights. Knows no modules.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headway.kernels.attention import paged_attention, write_kv
from headway.kernels.choices import Activations
from headway.kernels.cpu.library import Team
from headway.kernels.pack import row_chunks, unpack, unpack_rows
from headway.kernels.packed import FORMATS, LANES, FormatName, PackedWeight
from headway.kernels.reference import linear as reference


def _linear(
    x: torch.Tensor,
    data: torch.Tensor,
    format: FormatName,
    num_outputs: int,
    num_inputs: int,
    bias: torch.Tensor | None,
    activations: Activations,
) -> torch.Tensor:
    """Multiply x [..., K] with a packed weight [N, K]: [..., N] of x's dtype, summed in float32.

    data: PackedWeight.data; bias: [N]. Inputs are rounded, as kernels/linear.py tells, only for
    quantised formats.
    """
    weight = PackedWeight(format, num_outputs, num_inputs, data)
    values = x.reshape(-1, num_inputs).float()
    if activations == "int8" and FORMATS[format].scale_bytes and len(values):
        values = reference.row_values(reference.quantise_rows(values), len(values), num_inputs)
    # Unpacked piece by piece: the whole matrix in floats is what packing avoids.
    pieces = [
        F.linear(values, unpack(weight, rows.start // LANES, -(-(rows.stop - rows.start) // LANES)))
        for rows in row_chunks(weight)
    ]
    output = torch.cat(pieces, dim=-1).view(*x.shape[:-1], num_outputs)
    return (output if bias is None else output + bias.float()).to(x.dtype)


def _embedding(
    token_ids: torch.Tensor, data: torch.Tensor, format: FormatName, num_rows: int, num_columns: int
) -> torch.Tensor:
    """Return the rows of a packed weight: token_ids [...] int64 -> [..., num_columns] float32."""
    weight = PackedWeight(format, num_rows, num_columns, data)
    rows = unpack_rows(weight, token_ids.flatten())
    return rows.contiguous().view(*token_ids.shape, num_columns)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    cu_lengths: torch.Tensor,
    context_lengths: torch.Tensor,
    span_lengths: torch.Tensor,
    positions: torch.Tensor,
    tree_masks: torch.Tensor,
    layer_index: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: torch.Tensor | None = None,
    team: Team | None = None,
) -> torch.Tensor:
    """Write one layer's keys and values to `slots` of the cache, then attend: [1, T, H, D].

    query: [1, H, T, D]; key, value: [1, G, T, D], rotated; cache: [layers, 2, N, G, D], keys then
    values, mutated; scales: [layers, 2, N, G] float32 of an int8 cache, mutated. The others as in
    kernels/attention.py.
    """
    keys, values = cache[layer_index].unbind(0)
    key_scales, value_scales = (None, None) if scales is None else scales[layer_index].unbind(0)
    write_kv(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keys,
        values,
        slots,
        key_scales=key_scales,
        value_scales=value_scales,
        team=team,
    )
    output = paged_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        key_scales=key_scales,
        value_scales=value_scales,
        block_tables=block_tables,
        block_size=block_size,
        cu_lengths=cu_lengths,
        context_lengths=context_lengths,
        span_lengths=span_lengths,
        positions=positions,
        tree_masks=tree_masks,
        scale=scale,
        window=window,
        softcap=softcap,
        team=team,
    )
    return output[None].contiguous()


def _fake_linear(
    x: torch.Tensor, data: torch.Tensor, format: str, num_outputs: int, *_: object
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


def _fake_embedding(
    token_ids: torch.Tensor, data: torch.Tensor, format: str, num_rows: int, num_columns: int
) -> torch.Tensor:
    return token_ids.new_empty(*token_ids.shape, num_columns, dtype=torch.float32)


def _fake_attention(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)


_SCHEMAS = {
    "linear": (
        "(Tensor x, Tensor data, str format, int num_outputs, int num_inputs, Tensor? bias, "
        "str activations) -> Tensor"
    ),
    "embedding": (
        "(Tensor token_ids, Tensor data, str format, int num_rows, int num_columns) -> Tensor"
    ),
    "attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) cache, Tensor slots, "
        "Tensor block_tables, Tensor cu_lengths, Tensor context_lengths, Tensor span_lengths, "
        "Tensor positions, Tensor tree_masks, int layer_index, int block_size, float scale, "
        "int? window=None, float? softcap=None, Tensor(b!)? scales=None) -> Tensor"
    ),
}
_BODIES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "linear": (_linear, _fake_linear),
    "embedding": (_embedding, _fake_embedding),
    "attention": (attend, _fake_attention),
}
for _name, _schema in _SCHEMAS.items():
    _body, _fake = _BODIES[_name]
    torch.library.define(f"headway::{_name}", _schema)
    torch.library.impl(f"headway::{_name}", "default", _body)
    torch.library.register_fake(f"headway::{_name}", _fake)

linear: Callable[..., torch.Tensor] = torch.ops.headway.linear.default
embedding: Callable[..., torch.Tensor] = torch.ops.headway.embedding.default
attention: Callable[..., torch.Tensor] = torch.ops.headway.attention.default
