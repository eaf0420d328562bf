"""What carries a graph from step to step is put there by another object's method, or through a local name of a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def said(folder: Path, source: str, level: str = "standard") -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level)]


CART = """
class Cart:
    def __init__(self, n):
        self.place, self.speed = torch.zeros(n, 1), torch.zeros(n, 1)

    def begin(self):
        self.place = torch.randn(8, 1){more}

class World:
    def __init__(self, cart):
        self.cart = cart

    def tick(self, push):
        cart = self.cart
        cart.speed = cart.speed + 0.1 * (push - cart.place)
        cart.place = cart.place + 0.1 * cart.speed

world = World(Cart(8))
pilot = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(pilot.parameters(), lr=0.01)
for _ in range(3):
    world.cart.begin()
    cost = 0.0
    for _ in range(3):
        world.tick(pilot(torch.cat([world.cart.place, world.cart.speed], 1)))
        cost = cost + world.cart.place.pow(2).mean()
    opt.zero_grad()
    cost.backward()
    opt.step()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_an_attribute_that_another_object_fills_is_blamed_where_it_is_filled(tmp_path: Path, level: str) -> None:
    diagnosis = said(tmp_path, CART.replace("{more}", ""), level)[0]
    assert diagnosis.code == "GG203"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "cart.speed = cart.speed + 0.1 * (push - cart.place)"
    # it is made several times in a step, as the trace or the loops in the source show: nothing is to be detached within the rollout
    assert diagnosis.fixes[0].patch is None and "before the loop" in diagnosis.fixes[0].title


def test_an_attribute_that_is_reset_is_sound(tmp_path: Path) -> None:
    assert not said(tmp_path, CART.replace("{more}", "\n        self.speed = torch.zeros(8, 1)"))


CENTRES = """
class Centres:
    def __init__(self):
        self.table = {side: [torch.zeros(3) for _ in range(2)] for side in ("left", "right")}

    def pull(self, side, z, y):
        rows = self.table[side]
        for c in (0, 1):
            rows[c] = 0.9 * rows[c] + 0.1 * z[y == c].mean(0)
        return (torch.stack(rows)[y] - z).pow(2).mean()

net, centres = nn.Linear(4, 3), Centres()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
y = torch.arange(8) % 2
for _ in range(3):
    loss = net(torch.randn(8, 4)).pow(2).mean() + centres.pull("left", net(torch.randn(8, 4)).tanh(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_part_filled_by_a_local_name_is_blamed_there_and_the_old_item_detached(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, CENTRES)[0]
    assert diagnosis.code == "GG203"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "rows[c] = 0.9 * rows[c] + 0.1 * z[y == c].mean(0)"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "rows[c].detach() + 0.1" in patch
    assert not said(tmp_path, applied(HEAD + CENTRES, patch).removeprefix(HEAD))
