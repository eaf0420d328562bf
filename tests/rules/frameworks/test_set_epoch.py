"""A DistributedSampler that repeats its order: what is told, and what is sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fixes.test_silent_places import said

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

PROGRAM = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
shares = DistributedSampler(data, 2, 0, shuffle=SHUFFLE)
loader = DataLoader(data, batch_size=3, sampler=shares)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)

def epoch_of(batches):
    for x, y in WRAPPED:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()

for epoch in range(6):
    BEGIN
    EPOCH
"""


def program(shuffle: str = "True", wrapped: str = "batches", begin: str = "pass", epoch: str = "epoch_of(loader)") -> str:
    return PROGRAM.replace("SHUFFLE", shuffle).replace("WRAPPED", wrapped).replace("BEGIN", begin).replace("EPOCH", epoch)


@pytest.mark.parametrize("wrapped", ["batches", "(pair for pair in batches)", "map(tuple, batches)"])
def test_the_loop_is_told(wrapped: str, tmp_path: Path) -> None:
    [found] = said(tmp_path, program(wrapped=wrapped))
    assert found.code == "GG713" and found.culprit is not None
    assert found.culprit.text == f"for x, y in {wrapped}"
    assert found.headline == "every epoch goes through `batches` in the same order: `batches.sampler.set_epoch` is not called"


@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize(
    "source",
    [
        program(begin="shares.set_epoch(epoch)"),
        program(shuffle="False"),
        program(begin="[model(x) for x, y in loader]", epoch="epoch_of(DataLoader(data, batch_size=6))"),
    ],
    ids=["set", "in order", "only evaluated"],
)
def test_what_is_sound(source: str, level: str, tmp_path: Path) -> None:
    assert said(tmp_path, source, level) == []
