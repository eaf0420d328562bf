"""GG604: layers that are replaced after the optimizer was made: the call that did it, and the optimizer made after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, said

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))
def fit(net, opt):
    for step in range(24):
        opt.zero_grad()
        net(torch.randn(16, 4)).pow(2).mean().backward()
        opt.step()
"""
BY_NAME = """
def slim(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and child.out_features > 1:
            setattr(module, name, nn.Linear(child.in_features, child.out_features, bias=False))
"""
BY_ATTRIBUTE = """
def slim(module):
    module.b = nn.Linear(8, 8, bias=False)
"""
DIRECT = """
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
groups = len(opt.param_groups)
slim(net)
fit(net, opt)
"""
IN_MAIN = """
def optimizer_for(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
def prepare(model):
    slim(model)
    return model
def main():
    net = Net()
    opt = optimizer_for(net)
    net = prepare(net)
    fit(net, opt)
main()
"""
TRAINER = """
class Trainer:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 100)
        self.adapt()
    def adapt(self):
        layer = nn.Linear(8, 8, bias=False)
        self.net.b = layer
    def run(self):
        fit(self.net, self.opt)
Trainer(Net()).run()
"""


@pytest.mark.parametrize(
    ("source", "culprit", "helper", "call"),
    [
        (
            NET + BY_NAME + DIRECT,
            "slim(net)",
            "setattr(module, name, nn.Linear(child.in_features, child.out_features, bias=False))",
            "slim(net)",
        ),
        (NET + BY_ATTRIBUTE + IN_MAIN, "prepare(net)", "module.b = nn.Linear(8, 8, bias=False)", "net = prepare(net)"),
        (NET + TRAINER, "self.net.b = layer", "self.adapt()", "self.adapt()"),  # the trainer's own method
    ],
    ids=["setattr", "helpers", "a trainer"],
)
def test_the_optimizer_is_made_after_the_call_that_replaces_layers(
    source: str, culprit: str, helper: str, call: str, tmp_path: Path
) -> None:
    first = said(tmp_path, source)[0]
    assert first.code == "GG604" and first.culprit is not None and culprit in (first.culprit.text or "")
    assert any(helper in (span.text or "") for span in first.related)
    line = (HEAD + source).splitlines().index(next(each for each in (HEAD + source).splitlines() if each.strip() == call)) + 1
    assert f"after line {line}, `{call}`" in first.fixes[0].title
    patch = first.fixes[0].patch
    assert patch is not None
    assert said(tmp_path, applied(source, patch)) == []


@pytest.mark.parametrize(
    "making",
    [
        "params = list(net.parameters())\nopt = torch.optim.SGD(params, lr=0.01)\nslim(net)\nfit(net, opt)\n",
        "opt = torch.optim.SGD(net.parameters(), lr=0.01)\nfor _ in range(2):\n    slim(net)\n    fit(net, opt)\n",
    ],
    ids=["a list made before", "a loop that uses it"],
)
def test_no_patch_where_moving_the_optimizer_is_not_enough(making: str, tmp_path: Path) -> None:
    first = said(tmp_path, NET + BY_ATTRIBUTE + "net = Net()\n" + making)[0]
    assert first.code == "GG604" and first.fixes[0].patch is None


KEPT_METHODS = {
    "a method in a variable": ("", "train = net.train\n    train()"),
    "a method of a part": ("", "cast = net.a.float\n    cast()"),
}


@pytest.mark.parametrize(("before", "call"), KEPT_METHODS.values(), ids=KEPT_METHODS)
def test_what_only_a_kept_method_leads_to_is_replaced(tmp_path: Path, before: str, call: str) -> None:
    source = f"""
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
{before}for fold in range(3):
    if fold:
        net = Net()
    {call}
    fit(net, opt)
"""
    found = said(tmp_path, NET + source)
    assert [(each.code, each.culprit and each.culprit.text) for each in found] == [("GG604", "net = Net()")]
