"""reduce, softmax and matmul: native bodies against plain torch."""

import pytest
import torch

from headway.kernels.cpu.library import Team
from headway.kernels.matmul import matmul
from headway.kernels.reduce import REDUCTIONS, reduce, softmax

SHAPES = [(1,), (7,), (3, 16), (5, 67), (2, 3, 4, 5, 33)]


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_reductions(team: Team, operation: str) -> None:
    torch.manual_seed(1)
    for shape in SHAPES:
        for x in (torch.randn(shape), torch.randn(*shape, 3)[..., 1], torch.randn(shape[::-1])):
            y = x.permute(*reversed(range(x.ndim))) if x.shape != shape else x
            out, expected = torch.empty(shape[:-1]), torch.empty(shape[:-1])
            reduce(operation, y, out=out, team=team)
            reduce(operation, y, out=expected)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_maximum_is_nan_if_an_element_is(team: Team) -> None:
    x = torch.randn(40, 40)
    x.fill_diagonal_(torch.nan)
    x[:, 39] = torch.inf
    out = torch.empty(40)
    reduce("max", x, out=out, team=team)
    assert out[:39].isnan().all()


def test_softmax(team: Team) -> None:
    torch.manual_seed(2)
    for shape in SHAPES:
        x = torch.randn(shape) * 10
        expected = torch.softmax(x, dim=-1)
        wide = torch.full((*shape, 2), 7.0)
        softmax(x, out=wide[..., 0], team=team)
        torch.testing.assert_close(wide[..., 0], expected, atol=1e-6, rtol=1e-5)
        assert (wide[..., 1] == 7).all()
        softmax(x, out=x, team=team)
        assert torch.equal(x, wide[..., 0])


def test_softmax_gives_masked_elements_nothing(team: Team) -> None:
    x = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf, -3e38]])
    softmax(x, out=x, team=team)
    torch.testing.assert_close(x, torch.tensor([[0.26894143, 0, 0.73105858, 0, 0]]))
    assert x[0, 1] == x[0, 3] == 0


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 67), (3, 5, 70, 130), (1, 33, 64, 64)])
def test_matmul(team: Team, shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(3)
    batches, rows, inner, columns = shape
    a, b = torch.randn(batches, rows, inner), torch.randn(batches, inner, columns)
    out = torch.empty(batches, rows, columns)
    matmul(a, b, out=out, team=team)
    torch.testing.assert_close(out, torch.bmm(a, b), atol=1e-4, rtol=1e-5)
    a_view = a.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    b_view = b.transpose(1, 2).contiguous().transpose(1, 2)
    whole = torch.full((columns, rows, batches, 2), 7.0)
    out_view = whole[..., 1].permute(2, 1, 0)
    matmul(a_view, b_view, out=out_view, team=team)
    assert torch.equal(out_view, out)
    assert (whole[..., 0] == 7).all()
    matmul(a[:, :1], b, out=out_view[:, :1], team=team)
    assert torch.equal(out_view, out)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        reduce("sum", torch.zeros(2, 3), out=torch.zeros(3))
    with pytest.raises(ValueError, match="no reduction 'product'"):
        reduce("product", torch.zeros(2, 3), out=torch.zeros(2))
    with pytest.raises(ValueError, match="not float32"):
        softmax(torch.zeros(2).double(), out=torch.zeros(2).double())
    with pytest.raises(ValueError, match="must be"):
        matmul(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), out=torch.zeros(1, 2, 3))
