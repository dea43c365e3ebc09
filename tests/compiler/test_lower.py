"""compile_graph: a program computes what the graph says, and what no kernel can do is named."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from headway.compiler.capture import capture
from headway.compiler.graph import MOVEMENT, VOCABULARY, Unsupported
from headway.compiler.lower import LOWERING
from headway.compiler.program import Program
from headway.compiler.step import compile_graph
from headway.kernels.cpu.library import Team

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Module(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": self.function(inputs["x"], inputs["rows"])}


def compiled(function: Function, team: Team) -> Program:
    inputs = {"x": torch.randn(5, 8), "rows": torch.tensor([4, 0, 3])}
    graph = capture(Module(function), inputs, {"x": {0: "T"}, "rows": {0: "R"}})
    return compile_graph(graph, {}, {"T": 16, "R": 16}, team)


FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x, rows: (2.0 - x) / (x * x + 1.0) + x.abs().sqrt() - 3 * x,
    "activations": lambda x, rows: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + x.relu(),
    "reductions": lambda x, rows: x.mean(-1, keepdim=True) + x.sum(-1)[:, None] - x.amax(-1, True),
    "softmax of heads": lambda x, rows: (
        x[None].view(1, -1, 2, 4).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2)[0]
    ),
    "slices": lambda x, rows: torch.cat([-x.exp()[:, 4:], x.exp()[:, 1:4:2]], dim=-1),
    "split": lambda x, rows: x.exp().chunk(2, -1)[1] * x.exp().unbind(1)[3][:, None],
    "a view that needs a copy": lambda x, rows: x.exp().view(-1, 2, 4).transpose(1, 2).flatten(1),
    "batched products": lambda x, rows: (
        x.view(-1, 2, 4) @ x.exp().view(-1, 4, 2) @ torch.ones(2, 3)
    ).flatten(1),
    "weights": lambda x, rows: F.linear(x, torch.full((3, 8), 0.5), torch.ones(3)) + 1.0,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_computes_what_the_module_computes(name: str, native_team: Team) -> None:
    program = compiled(FUNCTIONS[name], native_team)
    for num_rows in (1, 5, 16):
        x, rows = torch.randn(num_rows, 8), torch.tensor([0])
        program.run({"T": num_rows, "R": 1}, {"x": x, "rows": rows})
        expected = FUNCTIONS[name](x, rows)
        torch.testing.assert_close(program.output("y", num_rows), expected, rtol=1e-5, atol=1e-5)


UNSUPPORTED: dict[str, tuple[Function, str]] = {
    "rows that no output head chooses": (lambda x, rows: x.exp()[rows], "gather_rows"),
    "a part of an input": (lambda x, rows: x[:, 1:].exp(), "a part of the input"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_no_kernel_can_do_is_refused_by_name(case: str, native_team: Team) -> None:
    function, words = UNSUPPORTED[case]
    with pytest.raises(Unsupported, match=words):
        compiled(function, native_team)


def test_every_operation_but_movements_has_a_rule() -> None:
    # Rows are chosen by output_head alone, and copies are made by placement.
    assert set(LOWERING) == VOCABULARY - MOVEMENT - {"gather_rows"} | {"copy"}
