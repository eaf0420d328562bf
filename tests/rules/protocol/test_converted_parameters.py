"""GG603: parameters that no optimizer has, and that are converted to another dtype on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.running import only, said

PROGRAM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.extra = [nn.Linear(8, 8) for _ in range(2)]
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        x = self.body(x)
        for layer in self.extra:
            x = torch.relu(layer(x))
        return self.head(x)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(30):
    if step == 6:
        for module in (net, *net.extra):
            module.{convert}
    opt.zero_grad()
    net(torch.randn(16, 4).to(net.head.weight.dtype)).pow(2).mean().backward()
    opt.step()
    {after}
"""


@pytest.fixture(params=[False, True], ids=["written", "swapped"])
def swapping(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("convert", ["double()", "half()", "to(torch.bfloat16)"])
def test_what_no_optimizer_has_is_converted(convert: str, tmp_path: Path) -> None:
    culprit = "self.extra = [nn.Linear(8, 8) for _ in range(2)]"
    only(tmp_path, PROGRAM.format(convert=convert, after=""), "GG603", culprit)


@pytest.mark.usefixtures("swapping")
def test_what_is_updated_by_hand_after_the_conversion(tmp_path: Path) -> None:
    after = "[p.data.sub_(0.01 * p.grad) for layer in net.extra for p in layer.parameters()]; [layer.zero_grad() for layer in net.extra]"
    assert said(tmp_path, PROGRAM.format(convert="double()", after=after)) == []
