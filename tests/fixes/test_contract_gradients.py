"""Gradients that are asked for, handed over, assigned, returned: what is said, where it points, and that the patch repairs the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, said


def first(folder: Path, source: str, code: str, culprit: str, level: str = "standard") -> Diagnosis:
    found = said(folder, source, level)
    assert found, "nothing was said"
    diagnosis = found[0]
    assert diagnosis.code == code, diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == culprit, diagnosis.culprit
    return diagnosis


def repaired(source: str, diagnosis: Diagnosis) -> str:
    patch = diagnosis.fixes[0].patch
    assert patch is not None, diagnosis.fixes
    return applied(HEAD + source, patch).removeprefix(HEAD)


FIELD = """
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

def slope(u, x):
    return torch.autograd.grad(u, x, create_graph=True)[0]

x = torch.rand(16, 2, requires_grad=True)
u = net(x).squeeze(1)
row = slope(u, x)[3]
alone = net(x[3:4].detach().requires_grad_())
F.mse_loss(row, torch.zeros(2)).backward()
single = x[3:4].detach().requires_grad_()
assert torch.allclose(row, torch.autograd.grad(net(single).sum(), single)[0])
"""

INNER_LOSS = """
net = nn.Linear(3, 4)
x, y = torch.randn(4, 3), torch.randn(4, 4)
loss = F.mse_loss(net(x), y, reduction="none").mean(1)
grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_derivative_of_many_outputs_wants_grad_outputs(tmp_path: Path, level: str) -> None:
    diagnosis = first(tmp_path, FIELD, "GG401", "torch.autograd.grad(u, x, create_graph=True)", level)
    assert "`grad_outputs=`" in diagnosis.headline
    assert "mean()" not in diagnosis.fixes[0].title and any("16 times too small" in text for text in diagnosis.avoid)
    assert said(tmp_path, repaired(FIELD, diagnosis)) == []


def test_loss_of_an_inner_step_is_still_to_be_reduced(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, INNER_LOSS)[0]
    assert diagnosis.code == "GG401" and "`loss.mean()`" in diagnosis.fixes[0].title
    assert "grad_outputs=torch.ones_like(loss)" in diagnosis.fixes[1].title and ".backward(" not in diagnosis.fixes[1].title


LATE = """
class Frame:
    def __init__(self, pos):
        self.pos = pos

def measure(frame):
    frame.dist = (frame.pos[:, 0] - frame.pos[:, 1]).norm(dim=-1, keepdim=True)
    return frame

net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

def forces(frame):
    frame = measure(frame)
    frame.pos.requires_grad_()
    energy = net(frame.dist).sum()
    return -torch.autograd.grad(energy, frame.pos, create_graph=True)[0]

for it in range(3):
    forces(Frame(torch.randn(4, 2, 3))).pow(2).mean().backward()
"""

# used below the switch as well: whoever cut the way there, the switch did not come too late
NOT_LATE = """
net = nn.Linear(3, 1)

def forces(pos):
    span = pos.max()
    pos.requires_grad_()
    energy = net(pos.detach() / span).sum()
    return torch.autograd.grad(energy, pos)[0]

forces(torch.randn(4, 3))
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_switch_below_the_use(tmp_path: Path, level: str) -> None:
    diagnosis = first(tmp_path, LATE, "GG306", "frame.pos.requires_grad_()", level)
    assert "comes after `measure(frame)`, which used it" in diagnosis.headline
    assert said(tmp_path, repaired(LATE, diagnosis)) == []


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_switch_above_a_use_is_not_to_blame(tmp_path: Path, level: str) -> None:
    diagnosis = said(tmp_path, NOT_LATE, level)[0]
    assert diagnosis.code == "GG306" and "comes after" not in diagnosis.headline


REVERSED = """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None, -ctx.strength * grad

net = nn.Linear(3, 2)
Reverse.apply(net(torch.randn(4, 3)), 0.5).pow(2).mean().backward()
"""

ONE_TOO_MANY = REVERSED.replace("return None, -ctx.strength * grad", "return -ctx.strength * grad, grad.sum()")


def test_gradient_at_the_place_of_a_number(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, REVERSED, "GG407", "None, -ctx.strength * grad")
    assert "at the place of `strength`, which was no tensor, and `None` at the place of `x`" in diagnosis.headline
    assert said(tmp_path, repaired(REVERSED, diagnosis)) == []


def test_gradient_for_a_number_beside_the_right_one(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, ONE_TOO_MANY, "GG407", "-ctx.strength * grad, grad.sum()")
    assert "`grad.sum()` at the place of `strength`" in diagnosis.headline and "`None` at" not in diagnosis.headline
    assert said(tmp_path, repaired(ONE_TOO_MANY, diagnosis)) == []


STE = """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        {write}
        return out

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        h = self.lin(x)
        return {value}

net = nn.Sequential(Block(), Block(), nn.Linear(6, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for it in range(5):
    opt.zero_grad()
    net(3 * torch.randn(8, 6)).pow(2).mean().backward()
    opt.step()
"""
WRITE = "out = grad\n        out[x.abs() > 1] = 0"


@pytest.mark.parametrize("value", ["Sign.apply(h) + h", "h + Sign.apply(h)"])
def test_backward_that_spoils_the_other_branch(tmp_path: Path, value: str) -> None:
    source = STE.format(write=WRITE, value=value)
    diagnosis = first(tmp_path, source, "GG407", "out[x.abs() > 1] = 0")
    assert "writes into `grad` in place" in diagnosis.headline and value in diagnosis.headline
    assert said(tmp_path, repaired(source, diagnosis)) == []


@pytest.mark.parametrize(
    ("write", "culprit"),
    [
        ("out = torch.mul(grad, 2.0, out=grad)", "torch.mul(grad, 2.0, out=grad)"),
        ("torch.mul(grad, 0.5, out=grad)\n        out = grad", "torch.mul(grad, 0.5, out=grad)"),
        ("if x.numel():\n            grad *= 2\n        out = grad", "grad *= 2"),
        ("out = [row.clamp_(-1e-3, 1e-3) for row in grad.unbind(0)] and grad", "row.clamp_(-1e-3, 1e-3)"),
        ("out = halved(grad)", "gradient.data.div_(2)"),
        ("out = nn.functional.relu(grad, inplace=True)", "nn.functional.relu(grad, inplace=True)"),
    ],
    ids=["out", "out alone", "branch", "rows", "helper", "flag"],
)
def test_however_the_write_is_written(tmp_path: Path, write: str, culprit: str) -> None:
    helper = "def halved(gradient):\n    gradient.data.div_(2)\n    return gradient\n"
    source = helper + STE.format(write=write, value="Sign.apply(h) + h")
    diagnosis = first(tmp_path, source, "GG407", culprit)
    assert "writes into `grad` in place" in diagnosis.headline
    assert said(tmp_path, repaired(source, diagnosis)) == []


@pytest.mark.parametrize(
    ("write", "value"),
    [
        (WRITE, "Sign.apply(h)"),  # nobody else has this gradient
        (WRITE, "Sign.apply(h) + 2 * h.tanh().exp()"),  # runs before it does: it is newer
        (WRITE, "torch.cat([Sign.apply(h), h], 1)[:, :6]"),
        ("out = grad.clone()\n        out[x.abs() > 1] = 0", "Sign.apply(h) + h"),
        ("out = grad * (x.abs() <= 1)\n        out *= 1.0", "Sign.apply(h) + h"),
        (WRITE, "Sign.apply(h) * h"),  # each has its own gradient
        (WRITE, "Sign.apply(h) + h.detach()"),
        ("out = torch.mul(grad, 2.0, out=torch.empty_like(grad))", "Sign.apply(h) + h"),
        ("out = grad\n        if not x.numel():\n            grad *= 2", "Sign.apply(h) + h"),
    ],
    ids=["alone", "newer", "pieces", "clone", "product", "factors", "detached", "out of its own", "not taken"],
)
def test_backward_that_writes_what_is_its_own(tmp_path: Path, write: str, value: str) -> None:
    assert said(tmp_path, STE.format(write=write, value=value)) == []


ASSIGNED = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(3):
    for p in net.parameters():
        mean = np.stack([np.random.randn(*p.shape) for _ in range(3)]).mean(0)
        p.grad = torch.from_numpy(mean)
    opt.step()
"""


def test_gradient_assigned_in_another_dtype(tmp_path: Path) -> None:
    source = "import numpy as np\n" + ASSIGNED
    diagnosis = first(tmp_path, source, "GG404", "torch.from_numpy(mean)")
    assert "float64" in diagnosis.headline and "`p.grad`" in diagnosis.headline
    assert said(tmp_path, repaired(source, diagnosis)) == []


INTEGERS = """
class Steps(nn.Module):
    def __init__(self, levels):
        super().__init__()
        self.levels = nn.Parameter(torch.tensor(levels))

Steps([1, 2, 4])
"""


def test_parameter_of_integers(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, INTEGERS, "GG404", "torch.tensor(levels)")
    assert "`self.levels`" in diagnosis.headline and "loss" not in diagnosis.explanation
    assert said(tmp_path, repaired(INTEGERS, diagnosis)) == []


SENT_BACK = """
front, back = nn.Conv2d(1, 2, 3), nn.Linear(18, 1)
out = front(torch.randn(4, 1, 5, 5))
flat = out.detach().flatten(1).requires_grad_()
back(flat).pow(2).mean().backward()
out.backward(flat.grad)
"""


def test_gradient_that_lies_flat(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, SENT_BACK)[0]
    assert diagnosis.code == "GG402" and "ones_like" not in diagnosis.fixes[0].title
    assert said(tmp_path, repaired(SENT_BACK, diagnosis)) == []


CLIPPED = """
def clipped(limit):
    def hook(module, grad_in, grad_out):
        return tuple(None if g is None else g.clamp(-limit, limit) for g in grad_out)
    return hook

net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
for layer in (net[0], net[2]):
    layer.register_full_backward_hook(clipped(0.1))
net(torch.randn(4, 6, requires_grad=True)).pow(2).mean().backward()
"""


def test_hook_that_returns_the_other_side(tmp_path: Path) -> None:
    source = CLIPPED
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.code == "GG408" and "`grad_in` instead of `grad_out`" in diagnosis.fixes[0].title
    assert any("`net.0`" in note for note in diagnosis.notes)
    assert said(tmp_path, repaired(source, diagnosis)) == []
