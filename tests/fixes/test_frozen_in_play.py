"""A loss without a path whose optimizer has nothing to train: the freezing is named, not a detach on the way that is as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, run_source

GAN = """
def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag

G, D = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for it in range(40):
    fake = G(torch.randn(8, 4))
    {off}
    g = F.softplus(-D(fake{mistake})).mean()
    og.zero_grad(); g.backward(); og.step()
    {on}
    d = F.softplus(-D(torch.randn(8, 2))).mean() + F.softplus(D(fake.detach())).mean()
    od.zero_grad(); d.backward(); od.step()
"""
CALL = "set_requires_grad(D, False)"
LOOP = "for p in D.parameters(): p.requires_grad_(False)"
METHOD = "D.requires_grad_(False)"
IN_A_HELPER = """
class Trainer:
    def __init__(self):
        self.gen, self.disc = nn.Linear(4, 2), nn.Linear(2, 1)
        self.optims = {"g": torch.optim.SGD(self.gen.parameters(), lr=0.1), "d": torch.optim.SGD(self.disc.parameters(), lr=0.1)}

    def freeze(self, module):
        for p in module.parameters():
            p.requires_grad = False

    def apply(self, loss, optimizer):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def step(self):
        fake = self.gen(torch.randn(8, 4))
        self.freeze(self.disc)
        self.apply(F.softplus(-self.disc(fake)).mean(), self.optims["g"])
        score = self.disc(fake.detach())
        self.apply(F.softplus(score).mean(), self.optims["d"])

trainer = Trainer()
for it in range(3):
    trainer.step()
"""


def only(folder: Path, source: str, level: str) -> Diagnosis:
    found = run_source(folder, HEAD + source, level)
    assert len(found) == 1
    return found[0][0]


def gan(off: str, on: str = "", mistake: str = "") -> str:
    return GAN.format(off=off, on=on, mistake=mistake)


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("off", [CALL, LOOP, METHOD])
def test_the_freezing_is_the_culprit(off: str, level: str, tmp_path: Path) -> None:
    found = only(tmp_path, gan(off), level)
    assert found.code == "GG303"
    assert "all 4 parameters of `od`, which trains `D`, are frozen" in found.headline
    assert found.culprit is not None and (found.culprit.text or "") in off and found.culprit.line == HEAD.count("\n") + 10
    assert "detach" not in " ".join(fix.title for fix in found.fixes)
    again = "set_requires_grad(D, True)" if off == CALL else "D.requires_grad_(True)"
    assert f"`{again}`" in found.fixes[0].title
    assert run_source(tmp_path, HEAD + gan(off, again), level) == []


def test_in_the_methods_of_a_class(tmp_path: Path) -> None:
    found = only(tmp_path, IN_A_HELPER, "standard")
    assert found.code == "GG303" and "`self.disc`" in found.headline
    assert found.culprit is not None and found.culprit.text == "self.freeze(self.disc)"


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_detach_in_the_loss_of_the_other_network_is_still_blamed(level: str, tmp_path: Path) -> None:
    found = only(tmp_path, gan(CALL, "set_requires_grad(D, True)", ".detach()"), level)
    assert found.code == "GG302"
    assert found.culprit is not None and found.culprit.text == "fake.detach()" and found.culprit.line == HEAD.count("\n") + 11


def test_a_loss_that_does_not_come_from_the_frozen_part(tmp_path: Path) -> None:
    source = gan(CALL).replace("d = F.softplus", "d = fake.detach().pow(2).mean() #")
    assert only(tmp_path, source, "standard").code == "GG302"


def test_an_attribute_that_was_to_switch_a_part_on_is_the_cause(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
for weight in body.parameters():
    weight.requires_grad_(False)
body[2].requires_grad = True
opt = torch.optim.SGD(body[2].parameters(), lr=0.1)
error = body(torch.randn(5, 3)).pow(2).mean()
error.backward()
opt.step()
"""
    )
    [(told, _)] = run_source(tmp_path, source)
    assert told.code == "GG303"
    assert told.culprit is not None and told.culprit.text == "body[2].requires_grad = True"


THAWED = """
class Phases:
    def __init__(self, parts):
        self.parts = list(parts)
        for part in self.parts:
            part.requires_grad_(False)

    def thaw(self, phase):
        for part in self.parts[len(self.parts) - phase:]:
            part.requires_grad_(True)

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
phases = Phases(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for phase in range({first}, 3):
    phases.thaw(phase)
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
"""


def test_switch_that_was_to_thaw_them(tmp_path: Path) -> None:
    found = only(tmp_path, THAWED.format(first=0), "standard")
    assert "`Phases.thaw`" in found.fixes[0].title and found.related[0].text == "part.requires_grad_(True)"
    assert run_source(tmp_path, HEAD + THAWED.format(first=1)) == []


SEVERAL = {
    "one or a list": """
def switch(nets, flag=False):
    for net in nets if isinstance(nets, (list, tuple)) else [nets]:
        for p in net.parameters():
            p.requires_grad = flag
""",
    "any number": """
def switch(*nets, flag=False):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag
""",
    "made a list": """
def switch(nets, flag=False):
    for net in list(nets if isinstance(nets, list) else [nets]):
        net.requires_grad_(flag)
""",
}


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("helper", SEVERAL.values(), ids=SEVERAL)
def test_a_helper_for_one_network_or_several(helper: str, level: str, tmp_path: Path) -> None:
    for off in ("switch(D, flag=False)", "switch(D)"):
        found = only(tmp_path, helper + gan(off), level)
        assert found.code == "GG303"
        assert found.culprit is not None and found.culprit.text == off
    assert run_source(tmp_path, HEAD + helper + gan("switch(D)", "switch(D, flag=True)"), level) == []


THROUGH_A_TABLE = """
def switch(nets, flag):
    for name in nets:
        for p in TABLE[name].parameters():
            p.requires_grad = {flag}
"""


def test_a_helper_that_switches_both_ways_is_not_the_bug(tmp_path: Path) -> None:
    source = THROUGH_A_TABLE + gan("TABLE = {'D': D, 'G': G}; switch(['D'], False)")
    found = only(tmp_path, source.replace("{flag}", "flag"), "standard")
    assert found.code == "GG303" and found.culprit is None
    assert any("as it is told" in (span.label or "") for span in found.related)
    found = only(tmp_path, source.replace("{flag}", "False"), "standard")
    assert found.culprit is not None and found.culprit.text == "p.requires_grad = False"
    assert run_source(tmp_path, HEAD + source.replace("{flag}", "not flag")) == []
