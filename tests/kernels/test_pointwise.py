"""pointwise: native bodies against plain torch at odd sizes, strides and types."""

import pytest
import torch

from headway.kernels.cpu.library import Team
from headway.kernels.pointwise import BINARY, UNARY, pointwise

SHAPES = [(1,), (7, 33), (2, 3, 5), (2, 1, 3, 2, 17), (300,), (3, 520)]
EXACT = {"copy", "neg", "abs", "square", "relu", "round_bfloat16"}


def operand(operation: str, shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape) * 4
    return x.abs() + 0.1 if operation in ("sqrt", "rsqrt", "reciprocal", "pow") else x


@pytest.mark.parametrize("operation", UNARY)
def test_unary(team: Team, operation: str) -> None:
    torch.manual_seed(1)
    for shape in SHAPES:
        x, out, expected = operand(operation, shape), torch.empty(shape), torch.empty(shape)
        pointwise(operation, x, out=out, team=team)
        pointwise(operation, x, out=expected)
        tolerance = 0 if operation in EXACT else 2e-6
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("operation", BINARY)
def test_binary(team: Team, operation: str) -> None:
    torch.manual_seed(2)
    for shape in SHAPES:
        x, y = operand(operation, shape), operand(operation, shape)
        for a, b in [(x, y), (x, y[..., :1]), (x[:1], y), (x, 1.5), (2.5, y), (y[..., -1], x)]:
            if isinstance(a, torch.Tensor) and a.shape == shape[:-1]:
                a = a[..., None]
            out, expected = torch.empty(shape), torch.empty(shape)
            pointwise(operation, a, b, out=out, team=team)
            pointwise(operation, a, b, out=expected)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_values_at_the_edges(team: Team) -> None:
    x = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1e-40])
    # torch's gelu makes infinity NaN; sines of such numbers are noise.
    for operation in set(UNARY) - {"sin", "cos", "gelu"}:
        out, expected = torch.empty(8), torch.empty(8)
        pointwise(operation, x, out=out, team=team)
        pointwise(operation, x, out=expected)
        torch.testing.assert_close(out, expected, equal_nan=True)
    for operation in ("maximum", "minimum", "add", "mul"):
        out, expected = torch.empty(8, 8), torch.empty(8, 8)
        pointwise(operation, x, x[:, None], out=out, team=team)
        pointwise(operation, x, x[:, None], out=expected)
        torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, 0.5, -0.5, -1.0, -2.5, 1.7, 11.0])
def test_powers(team: Team, exponent: float) -> None:
    x, out = torch.linspace(0.1, 3, 33), torch.empty(33)
    pointwise("pow", x, exponent, out=out, team=team)
    torch.testing.assert_close(out, x**exponent, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16])
def test_types_become_floats(team: Team, dtype: torch.dtype) -> None:
    x = torch.randint(-500, 500, (3, 70)).to(dtype)
    for view in (x, x[:, ::3], x.T):
        out = torch.empty(view.shape)
        pointwise("copy", view, out=out, team=team)
        assert torch.equal(out, view.float())


def test_a_result_is_rounded_to_bfloat16(team: Team) -> None:
    x, y = torch.randn(5, 70), torch.randn(70)
    out = torch.empty(70, 5, dtype=torch.bfloat16)
    pointwise("add", x.T, y[:, None], out=out, team=team)
    assert torch.equal(out, (x.T + y[:, None]).bfloat16())


def test_strided_views_leave_the_rest_alone(team: Team) -> None:
    x = torch.randn(4, 6, 40)
    whole = torch.full((6, 9, 90), 7.0)
    out = whole[:, 2:6, 5:85:2]
    pointwise("neg", x.permute(1, 0, 2), out=out, team=team)
    assert torch.equal(out, -x.permute(1, 0, 2))
    out.fill_(7.0)
    assert (whole == 7.0).all()


def test_out_may_be_an_operand(team: Team) -> None:
    x, y = torch.randn(7, 300), torch.randn(7, 300)
    expected = x + y
    pointwise("add", x, y, out=x, team=team)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_nothing_to_do(team: Team, shape: tuple[int, ...]) -> None:
    pointwise("neg", torch.empty(shape), out=torch.empty(shape), team=team)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("negate", torch.zeros(2), None, torch.zeros(2)), "there are copy, neg"),
        (("neg", torch.zeros(2), 1.0, torch.zeros(2)), "two operands"),
        (("add", 1.0, 2.0, torch.zeros(2)), "needs a tensor"),
        (("neg", torch.zeros(3), None, torch.zeros(2)), "does not broadcast"),
        (("neg", torch.zeros(2), None, torch.zeros(2).double()), "not floats"),
        (("neg", torch.zeros(2).double(), None, torch.zeros(2)), "float64"),
    ],
)
def test_what_cannot_be_is_named(
    arguments: tuple[str, torch.Tensor | float, float | None, torch.Tensor], message: str
) -> None:
    operation, a, b, out = arguments
    with pytest.raises(ValueError, match=message):
        pointwise(operation, a, b, out=out)
