"""Freezes by parameters' names: conditions that no name satisfies, and sound ones (GG613)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

NAMED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.encoder(x))
class Task(nn.Module):
    def __init__(self, net, prefixes):
        super().__init__()
        self.net, self.quick = net, True
        self.freeze(prefixes)
    def freeze(self, prefixes):
        if not prefixes:
            return
        for name, parameter in self.named_parameters():
            if {test}:
                parameter.requires_grad = False
    def forward(self, x):
        return self.net(x)
def main(prefixes={prefixes}):
    task = Task(Net(), prefixes)
    opt = torch.optim.SGD([p for p in task.parameters() if p.requires_grad], lr=0.05)
    for _ in range(15):
        opt.zero_grad()
        task(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
main()
"""
ANY = "any(name.startswith(each) for each in prefixes)"


@pytest.mark.parametrize("level", ["standard", "watch"])
@pytest.mark.parametrize("test", ["name.startswith(tuple(prefixes))", ANY, 'name.split(".")[0] == "encoder"'])
def test_names_that_begin_otherwise(tmp_path: Path, test: str, level: str) -> None:
    diagnosis = only(tmp_path, NAMED.format(test=test, prefixes='("encoder.",)'), "GG613", test, level)
    assert "net.encoder.0.weight`" in diagnosis.headline and "`freeze()`" in diagnosis.headline


FROM_THE_NAME = [
    "parameter.requires_grad = {}",
    "parameter.requires_grad_({})",
    "parameter.requires_grad_(requires_grad={})",
]
BRANCH = """            if {test}:
                parameter.requires_grad = False
"""
NONE = "not name.startswith(tuple(prefixes))"


@pytest.mark.parametrize("level", ["standard", "watch"])
@pytest.mark.parametrize(
    ("written", "test"),
    [
        (FROM_THE_NAME[0], NONE),
        (FROM_THE_NAME[1], f"not {ANY}"),
        (FROM_THE_NAME[2], NONE),
        (FROM_THE_NAME[0], "True if not name.startswith(tuple(prefixes)) else False"),
    ],
)
def test_a_flag_that_comes_from_the_name(tmp_path: Path, written: str, test: str, level: str) -> None:
    source = NAMED.replace(BRANCH, f"            {written.format(test)}\n")
    diagnosis = only(tmp_path, source.replace("{prefixes}", '("encoder.",)'), "GG613", test, level)
    assert "net.encoder.0.weight`" in diagnosis.headline and "is true for every name" in diagnosis.headline


@pytest.mark.parametrize(
    ("test", "prefixes"),
    [
        (NONE, '("net.encoder.",)'),
        (NONE, '("decoder.",)'),
        (NONE, "()"),
        ("not prefixes or True", '("encoder.",)'),
        ("parameter.dim() > 0 or name.startswith(tuple(prefixes))", '("encoder.",)'),
        ('"net" in name', '("encoder.",)'),
    ],
)
def test_flags_that_come_from_the_name_and_are_meant(tmp_path: Path, test: str, prefixes: str) -> None:
    for written in FROM_THE_NAME[:2]:
        source = NAMED.replace(BRANCH, f"            {written.format(test)}\n")
        assert said(tmp_path, source.replace("{prefixes}", prefixes)) == []


@pytest.mark.parametrize(
    ("test", "prefixes"),
    [
        (ANY, '("net.encoder.",)'),
        (ANY, "()"),
        (ANY, '("decoder.",)'),  # of another network: nothing here has such a name
        (f"not self.quick and {ANY}", '("encoder.",)'),
        ('"net" not in name', "[0]"),  # the words are those of what is trained
        ('name == "bias"', "[0]"),  # of this module itself: it has none
        (f"len(torch.__version__) == 0 and {ANY}", '("encoder.",)'),  # not known without running it
    ],
)
def test_freezes_that_hold_or_are_not_wanted(tmp_path: Path, test: str, prefixes: str) -> None:
    assert said(tmp_path, NAMED.format(test=test, prefixes=prefixes)) == []


WRAPPED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.encoder(x).tanh())
def freeze(model):
    for name, parameter in model.named_parameters():
        if name.startswith("encoder."):
            parameter.requires_grad_(False)
def main(frozen):
    net = Net()
    if frozen:
        freeze(net)
    whole = nn.Sequential(net, nn.Identity())
    opt = torch.optim.SGD(whole.parameters(), lr=0.05)
    for _ in range(15):
        opt.zero_grad()
        whole(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
main({frozen})
"""


@pytest.mark.parametrize("frozen", ["True", "False"])
def test_networks_that_are_wrapped_later_or_left_as_they_are(tmp_path: Path, frozen: str) -> None:
    assert said(tmp_path, WRAPPED.replace("{frozen}", frozen)) == []
