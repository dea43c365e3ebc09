"""Graphs as JSON files, so that a second start need not trace the model again.

A file holds no weights: constants are named as the module names them, and are the module's own. Its
first line is the SHA-256 of the rest, since numbers in it become addresses that nothing checks again.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headway.compiler.graph import Constant, Graph, TensorType, node
from headway.kernels.packed import PackedWeight

_MAX_INLINE = 4096
"""Elements of a constant that no module holds, such as a number the model's code makes."""


def save_graph(graph: Graph, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a graph whose constants are among `tensors`, or small. Raises OSError or ValueError."""
    weights: dict[str, Any] = {}
    inline: dict[str, Any] = {}
    for name, constant in graph.constants.items():
        if isinstance(constant, PackedWeight):
            weights[name] = [constant.format, constant.num_outputs, constant.num_inputs]
        elif name not in tensors:
            if constant.numel() > _MAX_INLINE:
                raise ValueError(f"the constant {name} is too large to be written")
            inline[name] = [str(constant.dtype), list(constant.shape), constant.flatten().tolist()]
    written = {
        "inputs": {name: _type(each) for name, each in graph.inputs.items()},
        "constants": list(graph.constants),
        "weights": weights,
        "inline": inline,
        "nodes": [
            [each.op, each.output, each.inputs, _type(each.type), dict(each.attributes)]
            for each in graph.nodes
        ],
        "outputs": dict(graph.outputs),
    }
    staging = path.with_suffix(".partial")
    text = json.dumps(written)
    staging.write_text(f"{_digest(text)}\n{text}")
    staging.rename(path)


def load_graph(path: Path, tensors: Mapping[str, torch.Tensor]) -> Graph:
    """Read a graph and give it its constants. Raises OSError, ValueError or KeyError."""
    digest, _, text = path.read_text().partition("\n")
    if digest != _digest(text):
        raise ValueError("it is damaged: its text has another SHA-256 than its first line says")
    read = json.loads(text)
    constants: dict[str, Constant] = {}
    for name in read["constants"]:
        if name in read["weights"]:
            weight_format, num_outputs, num_inputs = read["weights"][name]
            constants[name] = PackedWeight(weight_format, num_outputs, num_inputs, tensors[name])
        elif name in read["inline"]:
            dtype, shape, values = read["inline"][name]
            constants[name] = torch.tensor(values, dtype=_dtype(dtype)).view(shape)
        else:
            constants[name] = tensors[name]
    nodes = [
        node(op, output, inputs, _read_type(each), **_tuples(attributes))
        for op, output, inputs, each, attributes in read["nodes"]
    ]
    inputs = {name: _read_type(each) for name, each in read["inputs"].items()}
    return Graph(inputs, constants, tuple(nodes), read["outputs"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _type(each: TensorType) -> list[Any]:
    return [list(each.shape), str(each.dtype)]


def _read_type(written: list[Any]) -> TensorType:
    shape, dtype = written
    return TensorType(tuple(shape), _dtype(dtype))


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _tuples(attributes: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where attributes are tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in attributes.items()
    }
