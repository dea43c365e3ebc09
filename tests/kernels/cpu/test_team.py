"""A team runs programs: every body on every thread, in order, whatever the number of threads."""

import torch

from headway.kernels.cpu.library import Team


def test_rows_are_divided(team: Team) -> None:
    x, weight, out = torch.randn(7, 33), torch.randn(33), torch.empty(7, 33)
    team.call(
        "rms_norm",
        x=x,
        x_stride=33,
        x_inner_stride=0,
        weight=weight,
        epsilon=1e-5,
        out=out,
        out_stride=33,
        out_inner_stride=0,
        num_rows=7,
        num_inner=1,
        width=33,
    )
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (33,), weight, 1e-5))
