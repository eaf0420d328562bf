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
