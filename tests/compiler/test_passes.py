"""Passes: each finds its pattern, leaves what only looks like it, and changes no result."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from headway.compiler.capture import capture
from headway.compiler.graph import Graph, TensorType, node
from headway.compiler.interpret import interpret
from headway.compiler.passes.fuse import fuse_rms_norm, fuse_rope, fuse_rotated_attention
from headway.compiler.passes.products import (
    fuse_gates,
    fuse_output_head,
    fuse_residuals,
    join_products,
    pack_weights,
)
from headway.compiler.passes.simplify import drop_identities, fold_constants, merge_equal

Pass = Callable[[Graph], Graph]
H = 32


class Layer(torch.nn.Module):
    """Weights for the cases below; `case` is a function of the layer and its input."""

    def __init__(self, case: "Case") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"a": (16, H), "b": (16, H), "c": (48, H), "odd": (9, H), "square": (H, H)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape, generator=generator))
        self.register_buffer("gain", torch.rand(H, generator=generator))
        self.register_buffer("bias", torch.rand(16, generator=generator))
        self.case = case

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": self.case(self, inputs["x"], inputs["rows"])}


Case = Callable[..., torch.Tensor]


def norm(layer: Layer, x: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    return layer.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def rotate(x: torch.Tensor, sign: int = -1) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([sign * x[..., half:] if sign == 1 else -x[..., half:], x[..., :half]], -1)


def gate(layer: Layer, x: torch.Tensor, up: str = "b") -> torch.Tensor:
    return F.silu(F.linear(x, layer.a)) * F.linear(x, getattr(layer, up))


def read_twice(layer: Layer, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    gates = F.linear(x, layer.a)
    return F.silu(gates) * F.linear(x, layer.b) + gates


def soft(layer: Layer, x: torch.Tensor, rows: torch.Tensor, cap: float = 3.0) -> torch.Tensor:
    return torch.tanh(F.linear(x[rows], layer.c) / 3.0) * cap


FUSIONS: dict[str, tuple[list[Pass], Case, dict[str, int]]] = {
    "a norm": ([fuse_rms_norm], lambda w, x, r: norm(w, x), {"rms_norm": 1}),
    "a norm with gain 1 + w": (
        [fold_constants, fuse_rms_norm],
        lambda w, x, r: x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5 * (1 + w.gain),
        {"rms_norm": 1},
    ),
    "a norm of something else": (
        [fuse_rms_norm],
        lambda w, x, r: w.gain * (x.abs() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        {"rms_norm": 0},
    ),
    "a norm by cubes": (
        [fuse_rms_norm],
        lambda w, x, r: w.gain * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5)),
        {"rms_norm": 0},
    ),
    "a rotation": ([fuse_rope], lambda w, x, r: x * x.cos() + rotate(x) * x.sin(), {"rope": 1}),
    "a rotation the other way": (
        [fuse_rope],
        lambda w, x, r: x * x.cos() + rotate(x, 1) * x.sin(),
        {"rope": 0},
    ),
    "a gate": ([pack_weights, fuse_gates], lambda w, x, r: gate(w, x), {"gated_linear": 1}),
    "a gate the other way round": (
        [pack_weights, fuse_gates],
        lambda w, x, r: F.linear(x, w.b) * F.gelu(F.linear(x, w.a)),
        {"gated_linear": 1},
    ),
    "a gate that is read again": ([pack_weights, fuse_gates], read_twice, {"gated_linear": 0}),
    "a residual": (
        [pack_weights, fuse_residuals],
        lambda w, x, r: F.linear(x, w.square) + x,
        {"linear": 1, "add": 0},
    ),
    "a product added to itself": (
        [merge_equal, pack_weights, fuse_residuals],
        lambda w, x, r: F.linear(x, w.square) + F.linear(x, w.square),
        {"linear": 1, "add": 1},
    ),
    "three products": (
        [pack_weights, join_products],
        lambda w, x, r: F.linear(x, w.a) * F.linear(x, w.b) + F.linear(x, w.c)[:, :16],
        {"linear": 1},
    ),
    "products with biases": (
        [fold_constants, pack_weights, join_products],
        lambda w, x, r: F.linear(x, w.a, w.bias) * F.linear(x, w.b, 2 * w.bias),
        {"linear": 1},
    ),
    "products with a bias that is computed": (
        [pack_weights, join_products],
        lambda w, x, r: F.linear(x, w.a, w.bias) * F.linear(x, w.b, 2 * w.bias),
        {"linear": 2},
    ),
    "widths that do not fit panels": (
        [pack_weights, join_products],
        lambda w, x, r: F.linear(x, w.a)[:, :9] * F.linear(x, w.odd),
        {"linear": 2},
    ),
    "a head": (
        [pack_weights, fuse_output_head],
        lambda w, x, r: F.linear(x[r], w.c),
        {"output_head": 1},
    ),
    "a head with a soft-cap": ([pack_weights, fuse_output_head], soft, {"output_head": 1}),
    "a head bent otherwise": (
        [pack_weights, fuse_output_head],
        lambda w, x, r: soft(w, x, r, 2.0),
        {"output_head": 0},
    ),
    "identities": (
        [drop_identities],
        lambda w, x, r: (x * 1.0 + 0.0).view(-1, H).expand(-1, H) / 1.0 + w.gain,
        {"mul": 0, "view": 0, "expand": 0, "div": 0, "add": 1},
    ),
    "equal work": (
        [merge_equal],
        lambda w, x, r: (x.exp() + x.exp()).cos() * (x.exp() + x.exp()).cos(),
        {"exp": 1, "add": 1, "cos": 1, "mul": 1},
    ),
    "unequal work": (
        [merge_equal],
        lambda w, x, r: (x * 2.0) / (x * 3.0),
        {"mul": 2},
    ),
    "constants": ([fold_constants], lambda w, x, r: x * (w.gain + 1).rsqrt(), {"mul": 1, "add": 0}),
}


@pytest.mark.parametrize("case", FUSIONS)
def test_a_pass_finds_its_pattern_and_keeps_the_result(case: str) -> None:
    passes, function, expected = FUSIONS[case]
    x, rows = torch.randn(7, H), torch.tensor([6, 0, 3])
    graph = capture(Layer(function), {"x": x, "rows": rows}, {"x": {0: "T"}, "rows": {0: "R"}})
    before = interpret(graph, {"x": x, "rows": rows}, {"T": 7, "R": 3})["logits"]
    for each in passes:
        graph = each(graph)
        graph.check()
    counts = Counter(node.op for node in graph.nodes)
    assert {op: counts[op] for op in expected} == expected
    after = interpret(graph, {"x": x, "rows": rows}, {"T": 7, "R": 3})["logits"]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def rotations(shared: bool) -> Graph:
    """One layer's attention by hand: q and k are slices of one product; `shared` reads q again."""
    row = TensorType(("T", 1, 4))
    made = [
        node("linear", "qkv", ["x", "w"], TensorType(("T", 12))),
        *(
            node("slice", name, ["qkv"], TensorType(("T", 4)), dim=1, start=at, end=at + 4, step=1)
            for at, name in ((0, "q"), (4, "k"), (8, "v"))
        ),
        *(node("view", f"{name}.heads", [name], row) for name in "qkv"),
        *(node("rope", f"{name}.turned", [f"{name}.heads", "cos", "sin"], row) for name in "qk"),
        node("attention", "y", ["q.turned", "k.turned", "v.heads"], row),
        node("neg", "z", ["q"], TensorType(("T", 4))),
    ]
    angle = TensorType(("T", 1, 4))
    outputs = {"y": "y", "z": "z"} if shared else {"y": "y"}
    inputs = {"x": TensorType(("T", 4)), "cos": angle, "sin": angle}
    graph = Graph(inputs, {"w": torch.zeros(12, 4)}, tuple(made), outputs)
    return graph.with_nodes(made)


@pytest.mark.parametrize("shared", [False, True])
def test_queries_are_rotated_in_place_where_nobody_else_reads_them(shared: bool) -> None:
    graph = fuse_rotated_attention(rotations(shared))
    graph.check()
    counts = Counter(node.op for node in graph.nodes)
    assert counts["rotated_attention"] == (not shared)
    assert counts["rope"] == 2 * shared
