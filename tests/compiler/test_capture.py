"""capture: what the graph says is what the module does, and what it cannot say is named."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from headway.compiler.capture import capture
from headway.compiler.graph import Graph, Unsupported
from headway.compiler.interpret import interpret

Function = Callable[[torch.Tensor], torch.Tensor]


class Module(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("weight", torch.randn(6, 8))

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": self.function(inputs["x"])}


def graph_of(function: Function, x: torch.Tensor) -> Graph:
    return capture(Module(function), {"x": x}, {"x": {0: "T"}})


FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x: (2.0 - x) / (x * x + 1.0) + x.abs().sqrt() - 3 * x,
    "activations": lambda x: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + x.relu(),
    "functions": lambda x: x.exp() + x.tanh() + x.sigmoid() + x.sin() * x.cos() - (-x),
    "powers": lambda x: x.pow(2) + (x.square() + 1).rsqrt() + (x.abs() + 1) ** -0.5,
    "reductions": lambda x: (
        x.mean(-1, keepdim=True) + x.sum(-1)[:, None] + x.amax(-1, keepdim=True)
    ),
    "softmax": lambda x: x.softmax(-1),
    "heads": lambda x: x[None].view(1, -1, 2, 4).transpose(1, 2).exp().transpose(1, 2).flatten(2),
    "slices": lambda x: torch.cat([-x[:, 4:], x[:, 1:4:2]], dim=-1)[..., 0:5],
    "split": lambda x: x.chunk(2, -1)[1] * x.split([4, 3, 1], -1)[0] + x.unbind(1)[3][:, None],
    "broadcast": lambda x: x + torch.ones(8) * x[:, :1].expand(-1, 8),
    "products": lambda x: F.linear(x, torch.ones(3, 8), torch.ones(3)) @ torch.ones(3, 2),
    "norm": lambda x: F.rms_norm(x, (8,), torch.full((8,), 2.0), 1e-5),
    "casts": lambda x: x.double().float().to(torch.float32).type_as(x) + x.long().float() * 0,
}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "casts"])
def test_the_graph_computes_what_the_module_computes(name: str) -> None:
    x = torch.randn(5, 8)
    graph = graph_of(FUNCTIONS[name], x)
    graph.check()
    for num_rows in (1, 5, 12):
        x = torch.randn(num_rows, 8)
        found = interpret(graph, {"x": x}, {"T": num_rows})["y"]
        torch.testing.assert_close(found, FUNCTIONS[name](x), rtol=1e-5, atol=1e-5)


def test_weights_are_constants_of_the_graph() -> None:
    module = Module(lambda x: x)
    module.function = lambda x: F.linear(x, module.weight)  # type: ignore[arg-type]
    graph = capture(module, {"x": torch.randn(3, 8)}, {"x": {0: "T"}})
    (node,) = graph.nodes
    assert node.op == "linear"
    assert graph.constants[node.inputs[1]] is not None
    assert graph.type_of(node.inputs[1]).shape == (6, 8)


UNSUPPORTED: dict[str, tuple[Function, str]] = {
    "an unknown operation": (lambda x: x.cumsum(-1), "cumsum"),
    "a cast to whole numbers": (FUNCTIONS["casts"], "cast"),
    "a reduction over rows": (lambda x: x.sum(0), "dimensions"),
    "softmax over rows": (lambda x: x.softmax(0), "softmax"),
    "a part of the rows": (lambda x: x[1:], "T"),
    "a size nobody named": (lambda x: x[:, :, None].expand(-1, -1, 2).flatten(0, 1), "size"),
    "data-dependent sizes": (lambda x: x[x[:, 0] > 0], "gt"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_has_no_word_is_refused_by_name(case: str) -> None:
    function, word = UNSUPPORTED[case]
    with pytest.raises(Unsupported, match=word):
        graph_of(function, torch.randn(5, 8))
