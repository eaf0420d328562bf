"""What goes wrong late, while gradients are not followed: seen by the order of steps and backward calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.running import said

LATE = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
def again(optimizer):
    go = optimizer.step
    go()
for step in range({steps}):
    {loss}
    opt.step()
    {after}
    opt.zero_grad()
"""
LOSS = "net(torch.randn(8, 4)).pow(2).mean().backward()"
SLIPS = {
    "steps twice": (LOSS, "if step >= 80: opt.step()", "opt.step()"),
    "steps twice in a loop": (LOSS, "for _ in range(step // 80): opt.step()", "opt.step()"),
    "steps twice in a function": (LOSS, "if step >= 80: again(opt)", "go()"),
    "no backward call": (f"if step < 80: {LOSS}", "pass", "opt.step()"),
}


@pytest.mark.parametrize(("loss", "after", "culprit"), SLIPS.values(), ids=SLIPS)
def test_a_step_without_new_gradients_is_seen_when_it_begins(tmp_path: Path, loss: str, after: str, culprit: str) -> None:
    found = said(tmp_path, LATE.format(loss=loss, after=after, steps=130))
    assert [(each.code, each.culprit.text if each.culprit is not None else None) for each in found] == [("GG606", culprit)]


def test_several_backward_calls_for_a_step_are_silent(tmp_path: Path) -> None:
    other = "if step >= 80: net(torch.randn(8, 4)).mean().backward()"
    assert (
        said(tmp_path, LATE.format(loss=LOSS, after="pass", steps=130).replace("    opt.step()\n", f"    {other}\n    opt.step()\n")) == []
    )


NET = """
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.{optimizer}(net.parameters(), lr=0.01)
def batch():
    return torch.randn(8, 4)
def fit(x):
    net(x).pow(2).mean().backward()
    opt.step()
"""
KEPT = {
    "under a condition": """
for step in range(130):
    if step < 80:
        opt.zero_grad()
    net(batch()).pow(2).mean().backward()
    opt.step()
""",
    "a second loop": """
for x in [batch() for _ in range(80)]:
    net.zero_grad(set_to_none=False)
    fit(x)
for x in [batch() for _ in range(60)]:
    fit(x)
""",
    "by hand": """
class Trainer:
    clear = True
    def one(self, x):
        if self.clear:
            for p in net.parameters():
                p.grad = None
        net(x).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        opt.step()
trainer = Trainer()
for step in range(140):
    trainer.clear = step < 80
    trainer.one(batch())
""",
    "more and more rarely": """
for step in range(200):
    if step % (1 if step < 70 else 100) == 0:
        opt.zero_grad()
    fit(batch())
""",
}
CLEARED = {
    "accumulation from then on": """
for step in range(300):
    (net(batch()).pow(2).mean() / (1 if step < 80 else 4)).backward()
    if step < 80 or step % 4 == 3:
        opt.step()
        opt.zero_grad()
""",
    "by hand from then on": """
for step in range(200):
    if step < 80:
        opt.zero_grad(set_to_none=False)
    else:
        for p in net.parameters():
            p.grad = None
    fit(batch())
""",
    "all at once from then on": """
for step in range(200):
    if step < 80:
        opt.zero_grad()
    else:
        torch._foreach_zero_([p.grad for p in net.parameters()])
    fit(batch())
""",
    "after the step from then on": """
for step in range(200):
    if step < 80:
        opt.zero_grad()
    fit(batch())
    if step >= 79:
        net.zero_grad()
""",
}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("loop", KEPT.values(), ids=KEPT)
def test_gradients_that_are_no_longer_cleared(tmp_path: Path, loop: str, optimizer: str) -> None:
    found = said(tmp_path, NET.format(optimizer=optimizer) + loop)
    assert [(each.code, each.culprit and each.culprit.text) for each in found] == [("GG601", "opt.step()")]
    since = re.search(r"(?:nothing has cleared them since|`zero_grad\(\)` was last called before) step (\d+) of", found[0].headline)
    assert since is not None and 70 <= int(since[1]) <= 80


@pytest.mark.parametrize("loop", CLEARED.values(), ids=CLEARED)
def test_gradients_that_are_cleared_otherwise_from_then_on(tmp_path: Path, loop: str) -> None:
    assert said(tmp_path, NET.format(optimizer="SGD") + loop) == []


GAN = """
def net(*sizes):
    return nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:]))
G, D = net(4, 8, 4), net(4, 8, 1)
og, od = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (G, D))
def flip(module, on):
    for p in module.parameters():
        p.requires_grad = on
def critic():
    return (D(torch.randn(8, 4)) - D(G(torch.randn(8, 4)).detach())).mean()
def generator():
    og.zero_grad()
    D(G(torch.randn(8, 4))).mean().backward()
    og.step()
for step in range(160):
    {on}
    od.zero_grad()
    loss = critic()
    if loss.requires_grad:
        loss.backward()
    od.step()
    {off}
    generator()
"""
LEFT_OFF = {
    "all of it": ("if step < 80: flip(D, True)", "flip(D, False)", "flip(D, False)"),
    "all of it, by a flag": ("D.requires_grad_(step < 80)", "D.requires_grad_(False)", "D.requires_grad_(False)"),
    "a part of it": ("flip(D if step < 80 else D[2], True)", "flip(D, False)", "flip(D, False)"),
}
TURNS = {
    "always": ("flip(D, True)", "flip(D, False)"),
    "once and for all": ("D.requires_grad_(step < 80)", "pass"),
    "forty steps each": ("D.requires_grad_(step // 40 % 2 == 0)", "pass"),
}


@pytest.mark.parametrize(("on", "off", "culprit"), LEFT_OFF.values(), ids=LEFT_OFF)
def test_parameters_that_are_no_longer_switched_on(tmp_path: Path, on: str, off: str, culprit: str) -> None:
    found = said(tmp_path, GAN.format(on=on, off=off))
    assert [(each.code, each.culprit and each.culprit.text) for each in found] == [("GG605", culprit)]
    assert "no gradient any more" in found[0].headline


@pytest.mark.parametrize(("on", "off"), TURNS.values(), ids=TURNS)
def test_parameters_that_are_off_at_times_or_for_good(tmp_path: Path, on: str, off: str) -> None:
    assert said(tmp_path, GAN.format(on=on, off=off)) == []
