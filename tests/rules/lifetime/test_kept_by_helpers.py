"""GG203 and GG205 where helpers, methods by other names and functions off the stack keep or make the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only

BANK = """
from collections import deque
def put_into(owner, item):
    owner.bank.append(item)
class Memory:
    def __init__(self, size):
        self.bank = deque(maxlen=size)
    def put(self, item):
        {put}
    def items(self):
        return torch.cat(list(self.bank))
enc = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
opt = torch.optim.SGD(enc.parameters(), lr=0.01)
def finish(loss, memory, z):
    loss.backward()
    opt.step()
    {kept}
def main():
    memory = Memory(4)
    for step in range(4):
        z = enc(torch.randn(8, 4))
        loss = z.pow(2).mean()
        if len(memory.bank):
            loss = loss + (z @ memory.items().t()).mean()
        opt.zero_grad()
        finish(loss, memory, z)
main()
"""


@pytest.mark.parametrize(
    ("put", "kept", "culprit"),
    [
        ("self.bank.append(item)", "memory.put(z)", "self.bank.append(item)"),
        ("put_into(self, item)", "memory.put(z)", "owner.bank.append(item)"),
        ("keep = self.bank.append; keep(item)", "remember = memory.put; remember(z)", "keep(item)"),
    ],
    ids=["method", "helper", "other names"],
)
def test_a_bank_that_is_filled_in_each_step(put: str, kept: str, culprit: str, tmp_path: Path) -> None:
    only(tmp_path, BANK.format(put=put, kept=kept), "GG203", culprit)


CLOSURE = """
def compute(owner, x):
    return owner.coef(torch.exp(-x ** 2 / owner.width.exp()))
class Spline(nn.Module):
    def __init__(self):
        super().__init__()
        self.width, self.coef = nn.Parameter(torch.zeros(1)), nn.Linear(1, 1)
    def forward(self, x):
        return compute(self, x)
def begin(model, x):
    prediction = model(x)
    return prediction
model, x, y = Spline(), torch.rand(20, 1), torch.rand(20, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
for outer in range(2):
    {made}
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(prediction, y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("made", "culprit"),
    [("prediction = model(x)", "prediction = model(x)"), ("prediction = begin(model, x)", "prediction = model(x)")],
)
def test_a_prediction_made_outside_of_the_closure(made: str, culprit: str, tmp_path: Path) -> None:
    only(tmp_path, CLOSURE.format(made=made), "GG205", culprit)
