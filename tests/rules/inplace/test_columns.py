"""Writes through `.data` into parts of a memory: only what was saved of it matters, also where saved and written columns interleave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

SOURCE = """
class Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, value, column):
        ctx.column = column
        {write}
        return table

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[:, ctx.column], None

net = nn.Linear(3, 8)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scale = torch.ones(4, requires_grad=True)
for it in range(3):
    k = Put.apply(torch.zeros(8, 4), net(torch.randn(3)), 0)
    for i in range(3):
        mixed = (k[:, : i + 1] * scale[: i + 1]).sum(1)
        k = Put.apply(k, net(mixed[:3]), {column})
    opt.zero_grad()
    k.pow(2).mean().backward()
    opt.step()
"""
WRITES = ["table.data[:, column] = value", "table.data[:, column].copy_(value)", "table.data[..., column : column + 1] = value[:, None]"]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_columns_beside_the_saved_ones_are_free(write: str, level: str, tmp_path: Path) -> None:
    assert run_source(tmp_path, HEAD + SOURCE.format(write=write, column="i + 1"), level) == []


@pytest.mark.parametrize("write", WRITES)
def test_a_saved_column_is_not(write: str, tmp_path: Path) -> None:
    found = [diagnosis for diagnosis, _ in run_source(tmp_path, HEAD + SOURCE.format(write=write, column="i"), "standard")]
    assert [diagnosis.code for diagnosis in found] == ["GG109"]
    assert found[0].culprit is not None and found[0].culprit.text == write
    assert "`k` is passed here as `table`" in str(found[0].related)  # the call of `apply` has no argument for `ctx`


SHAPED = """
class Shaped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.detach().clone()
        {write}
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * 2 * y

net = nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(3):
    made = Shaped.apply(net(torch.randn(8, 3)))
    opt.zero_grad()
    made.mean().backward()
    opt.step()
"""


@pytest.mark.parametrize("write", ["y.data.clamp_(-0.1, 0.1)", "y.numpy()[:] *= 2"])
@pytest.mark.parametrize("level", ["standard", "forensic"])
def test_what_a_function_saves_after_it_has_written_is_as_it_was_saved(write: str, level: str, tmp_path: Path) -> None:
    assert run_source(tmp_path, HEAD + SHAPED.format(write=write), level) == []


CLAMPED = """
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(3):
    loss = net(torch.randn(8, 3)).pow(2).mean()
    for p in net.parameters():
        p.data.clamp_(-{most}, {most})
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("most, codes", [("5", []), ("0.1", ["GG109"])])
def test_a_write_that_changes_nothing_spoils_nothing(most: str, codes: list[str], tmp_path: Path) -> None:
    assert [found.code for found, _ in run_source(tmp_path, HEAD + CLAMPED.format(most=most), "standard")] == codes
