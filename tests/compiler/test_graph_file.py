"""Graphs as files: what is read is what was written, and damage is told from it."""

from pathlib import Path

import pytest
import torch

from headway.compiler.graph import Graph, TensorType, node
from headway.compiler.graph_file import load_graph, save_graph
from headway.kernels.pack import pack

WEIGHT = pack(torch.ones(5, 3), "f32")
TENSORS = {"self.weight": WEIGHT.data, "self.bias": torch.zeros(5)}
GRAPH = Graph(
    {"x": TensorType(("T", 3))},
    {"self.weight": WEIGHT, "self.bias": TENSORS["self.bias"], "two": torch.tensor([2.0])},
    (
        node("linear", "y", ["x", "self.weight", "self.bias"], TensorType(("T", 5))),
        node("mul", "z", ["y", "two"], TensorType(("T", 5))),
        node("permute", "w", ["z"], TensorType((5, "T")), dims=(1, 0)),
    ),
    {"out": "w"},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    save_graph(GRAPH, TENSORS, tmp_path / "graph.json")
    read = load_graph(tmp_path / "graph.json", TENSORS)
    assert (read.inputs, read.nodes, read.outputs) == (GRAPH.inputs, GRAPH.nodes, GRAPH.outputs)
    assert read.constants["self.weight"] == WEIGHT
    assert read.constants["self.bias"] is TENSORS["self.bias"]
    assert torch.equal(read.constants["two"], GRAPH.constants["two"])  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"T", 3', '"T", 9'),
        ("torch.float32", "torch.nothing"),
        ('"dims": [1, 0]', '"dims": [1, 7]'),
        ('"out": "w"', '"out": "v"'),
        ('"inputs"', "[" * 100_000 + '"inputs"'),
    ],
    ids=["width", "type", "attribute", "output", "depth"],
)
def test_a_file_that_parses_but_says_something_else_is_damaged(
    was: str, becomes: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    save_graph(GRAPH, TENSORS, path)
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes, 1))
    with pytest.raises(ValueError, match="damaged"):
        load_graph(path, TENSORS)
