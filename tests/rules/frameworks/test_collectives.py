"""Values that come back from a collective call have no path: who is said to be the culprit, and what is sound."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fixes.test_silent_places import said
from tests.running import HEAD, run_source

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()


CONTRAST = """
import torch.distributed as dist

def everywhere(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    GATHER
    return torch.cat(parts)

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.sound, self.picture = nn.Linear(5, 4), nn.Linear(6, 4)

    def forward(self, a, b):
        return F.normalize(self.sound(a), dim=-1), F.normalize(self.picture(b), dim=-1)

pairs = Pairs()
opt = torch.optim.Adam(pairs.parameters(), lr=1e-3)
for it in range(30):
    a, b = pairs(torch.randn(7, 5), torch.randn(7, 6))
    loss = F.cross_entropy(LOGITS, torch.arange(7))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
ONE_SIDED = CONTRAST.replace("LOGITS", "a @ everywhere(b).T")


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_gather(parts, t)",
        "dist.all_gather(tensor=t, tensor_list=parts)",
        "dist.gather(t, parts, dst=0)",
        "dist.all_to_all_single(parts[0], t)",
        "dist.scatter(parts[0], [t], src=0)",
    ],
)
def test_the_collective_is_the_culprit(call: str, tmp_path: Path) -> None:
    [found] = said(tmp_path, ONE_SIDED.replace("GATHER", call))
    assert found.code == "GG605" and "`pairs.picture`" in found.headline and call.partition("(")[0] in found.headline
    assert found.culprit is not None and found.culprit.text == call
    name = call.removeprefix("dist.").partition("(")[0]
    cure = "`parts[dist.get_rank()] = t`" if name == "all_gather" else f"`torch.distributed.nn.functional.{name}`"
    assert cure in found.fixes[0].title


def test_the_error_of_a_loss_made_of_gathered_values_only(tmp_path: Path) -> None:
    source = CONTRAST.replace("LOGITS", "everywhere(a) @ everywhere(b).T").replace("GATHER", "dist.all_gather(parts, t)")
    [(found, _)] = run_source(tmp_path, HEAD + source)
    assert found.code == "GG304" and found.culprit is not None and found.culprit.text == "dist.all_gather(parts, t)"


@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize(
    "gather",
    [
        "dist.all_gather(parts, t); parts[dist.get_rank()] = t",
        "dist.all_gather(parts, t); seen = torch.cat(parts).norm().item(); parts = [t]",  # looked at only
        "dist.all_gather(parts, t.detach()); parts = [t + 0 * parts[0]]",
    ],
)
def test_what_keeps_the_own_part_is_left_in_peace(gather: str, level: str, tmp_path: Path) -> None:
    assert said(tmp_path, ONE_SIDED.replace("GATHER", gather), level) == []
