"""What a contract is broken with is made in another function, or handed over in a dict: the place where it is made is told."""

from __future__ import annotations

from pathlib import Path

from tests.running import applied, only, said

SLICED_LATE = """
def derivative(out, *wrt):
    return torch.autograd.grad(out, wrt, torch.ones_like(out), create_graph=True)

def residual(net, points):
    FIRST
    SECOND
    return sum(part.square().mean() for part in derivative(u, x, t))

residual(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.rand(5, 2, requires_grad=True)).backward()
"""

CLAMPED_IN_A_HELPER = """
class Patch:
    def __init__(self):
        self.delta = self.initial()

    def initial(self):
        START

    def ascend(self):
        self.delta = self.delta + self.delta.grad.sign()

patch = Patch()
(patch.delta * torch.randn(4)).sum().backward()
patch.ascend()
"""

SETTINGS = """
def penalty(net, x):
    out = net(x)
    settings = {"create_graph": True, "grad_outputs": torch.ones(len(x))}
    (slope,) = torch.autograd.grad(out, x, **settings)
    return slope.square().mean()

penalty(nn.Linear(3, 1), torch.randn(5, 3, requires_grad=True)).backward()
"""


def test_the_place_where_it_was_made_is_told_without_a_trace(tmp_path: Path) -> None:
    late = SLICED_LATE.replace("FIRST", "u = net(points)").replace("SECOND", "x, t = points[:, :1], points[:, 1:]")
    diagnosis = only(tmp_path, late, "GG306", "x, t = points[:, :1], points[:, 1:]", "watch")
    assert diagnosis.headline.startswith("`x` is not in the graph") and "sliced from `points`" in diagnosis.headline
    early = SLICED_LATE.replace("FIRST", "x, t = points[:, :1], points[:, 1:]").replace("SECOND", "u = net(torch.cat([x, t], 1))")
    assert not said(tmp_path, early, "watch")

    start = "return torch.randn(4, requires_grad=True).clamp(-1, 1)"
    only(tmp_path, CLAMPED_IN_A_HELPER.replace("START", start), "GG307", start, "watch")
    assert not said(tmp_path, CLAMPED_IN_A_HELPER.replace("START", "return torch.randn(4).clamp(-1, 1).requires_grad_()"), "watch")

    diagnosis = only(tmp_path, SETTINGS, "GG402", "torch.autograd.grad(out, x, **settings)", "watch")
    assert "`torch.ones(len(x))`" in diagnosis.headline and diagnosis.fixes[0].patch is not None
    assert not said(tmp_path, applied(SETTINGS, diagnosis.fixes[0].patch), "watch")
