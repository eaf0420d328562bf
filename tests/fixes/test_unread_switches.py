"""Switches that nothing reads: a misspelt freeze, a flag set by hand, a dropout that eval() does not reach; each with a sound twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

FROZEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.eye(x)))

def hold(part):
    for weight in part.parameters():
        FREEZE

net = Net()
hold(net.eye)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(14):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 2).backward()
    opt.step()
"""

SCORED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        self.drops = MADE

    def forward(self, x):
        h = self.first(x).relu()
        h = DROP
        return self.out(h)

def score(net):
    net.eval()
    with torch.no_grad():
        made = [net(torch.randn(5, 4)).mean().item() for _ in range(4)]
    net.train()
    return made

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(12):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 2).backward()
    opt.step()
    if it % 4 == 3:
        score(net)
"""

FLAGGED = """
def score(model):
    OFF
    with torch.no_grad():
        made = [model(torch.randn(5, 4)).mean().item() for _ in range(4)]
    ON
    return made

net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(12):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 2).backward()
    opt.step()
    if it % 4 == 3:
        score(net)
"""


@pytest.mark.parametrize("name", ["require_grad", "requires_gard", "required_grad"])
def test_a_misspelt_freeze_is_named(tmp_path: Path, name: str) -> None:
    source = HEAD + FROZEN.replace("FREEZE", f"weight.{name} = False")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG613" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == f"weight.{name} = False"
    assert f"`{name} = False`" in diagnosis.headline and "`net.eye.weight`" in diagnosis.headline
    repaired = applied(source, diagnosis.fixes[0].patch or "")
    assert "weight.requires_grad = False" in repaired
    assert not run_source(tmp_path, repaired)


def test_a_misspelt_freeze_of_a_module_is_named(tmp_path: Path) -> None:
    source = HEAD + FROZEN.replace("hold(net.eye)", "net.eye.require_grad = False").replace("FREEZE", "pass")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG613" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == "net.eye.require_grad = False" and "requires_grad_(False)" in diagnosis.fixes[0].title


@pytest.mark.parametrize(
    ("freeze", "flag"),
    [
        ("setattr(weight, 'require_grad', False)", "require_grad"),
        ("weight.requires_gradient = False", "requires_gradient"),
        ("weight.require_grad, held = False, True", "require_grad"),
        ("vars(weight)['required_grad'] = False", "required_grad"),
    ],
)
def test_a_misspelt_freeze_is_named_however_it_is_set(tmp_path: Path, freeze: str, flag: str) -> None:
    (diagnosis,) = [each for each, _ in run_source(tmp_path, HEAD + FROZEN.replace("FREEZE", freeze))]
    assert diagnosis.code == "GG613" and f"`{flag} = False`" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == freeze


@pytest.mark.parametrize(
    "freeze",
    [
        "setattr(net.eye, 'requires_grad', False)",
        "part = net.eye\npart.requires_grad = False",
        "for part in [net.eye]: part.requires_grad = False",
        "trained = False\nnet.eye.requires_grad = trained",
    ],
)
def test_a_flag_on_a_module_is_named_however_it_is_set(tmp_path: Path, freeze: str) -> None:
    source = FROZEN.replace("hold(net.eye)", freeze).replace("FREEZE", "pass")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, HEAD + source)]
    assert diagnosis.code == "GG613" and "`net.eye` is trained" in diagnosis.headline
    assert diagnosis.culprit is not None and (diagnosis.culprit.text or "") in freeze and "requires_grad" in (diagnosis.culprit.text or "")


@pytest.mark.parametrize("other", ["weight.requires_grad = False", "weight.regularised = False", "weight._requires_grad = False"])
def test_other_attributes_of_parameters_are_silent(tmp_path: Path, other: str) -> None:
    assert not run_source(tmp_path, HEAD + FROZEN.replace("FREEZE", other))


def test_a_dropout_made_in_forward_is_named(tmp_path: Path) -> None:
    source = HEAD + SCORED.replace("MADE", "None").replace("DROP", "nn.Dropout(0.5)(h)")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG609" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == "nn.Dropout(0.5)" and "Net.eval()" in diagnosis.headline
    assert not run_source(tmp_path, applied(source, diagnosis.fixes[1].patch or ""))


def test_dropouts_in_a_plain_list_are_named(tmp_path: Path) -> None:
    source = HEAD + SCORED.replace("DROP", "sum(drop(h) for drop in self.drops) / 2")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source.replace("MADE", "[nn.Dropout(0.5), nn.Dropout(0.2)]"))]
    assert diagnosis.code == "GG609" and diagnosis.culprit is not None
    assert (diagnosis.culprit.text or "").startswith("self.drops = [") and "nn.ModuleList" in diagnosis.fixes[0].title
    assert not run_source(tmp_path, source.replace("MADE", "nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.2)])"))


def test_dropout_that_is_put_back_into_train_mode_is_meant(tmp_path: Path) -> None:
    source = HEAD + SCORED.replace("MADE", "nn.Dropout(0.5)").replace("DROP", "self.drops(h)")
    assert not run_source(tmp_path, source.replace("    net.eval()\n", "    net.eval()\n    net.drops.train()\n"))
    assert not run_source(tmp_path, HEAD + SCORED.replace("MADE", "None").replace("DROP", "nn.Dropout(0.5).train(self.training)(h)"))


def test_a_mode_flag_set_by_hand_is_named(tmp_path: Path) -> None:
    source = HEAD + FLAGGED.replace("OFF", "model.training = False").replace("ON", "model.training = True")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG609" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == "model.training = False"
    assert not run_source(tmp_path, applied(source, diagnosis.fixes[0].patch or "").replace("model.training = True", "model.train()"))


def test_flags_of_single_parts_after_eval_are_meant(tmp_path: Path) -> None:
    off = "model.eval()\n    model[2].training = True"
    assert not run_source(tmp_path, HEAD + FLAGGED.replace("OFF", off).replace("ON", "model[2].training = False\n    model.train()"))
