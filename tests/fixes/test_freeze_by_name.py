"""Freezes by parameters' names: conditions that no name satisfies, and sound ones (GG613)."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
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


# each with a network and an optimizer of its own; NAME is what the program looks for, N its number
SPELLINGS: dict[str, tuple[str, str]] = {
    "loop": ("for n, p in mN.named_parameters():\n    if n.startswith('NAME'):\n        p.requires_grad = False", "n.startswith('NAME')"),
    "flag": ("for n, p in mN.named_parameters():\n    p.requires_grad = not n.startswith('NAME')", "not n.startswith('NAME')"),
    "flag by another name": (
        "for n, p in mN.named_parameters():\n    part = n.startswith('NAME')\n    p.requires_grad = not part", "not part",
    ),
    "next": (
        "itemsN = iter(mN.named_parameters())\nwhile (item := next(itemsN, None)) is not None:\n    n, p = item\n"
        "    if n.startswith('NAME'):\n        p.requires_grad = False", "n.startswith('NAME')",
    ),
    "comprehension": ("[p.requires_grad_(False) for n, p in mN.named_parameters() if n.startswith('NAME')]", "n.startswith('NAME')"),
    "list of them": (
        "frozenN = [p for n, p in mN.named_parameters() if n.startswith('NAME')]\nfor p in frozenN:\n    p.requires_grad = False",
        "n.startswith('NAME')",
    ),
    "dict": (
        "tableN = dict(mN.named_parameters())\nfor key, value in tableN.items():\n    if 'NAME' == key[:len('NAME')]:\n"
        "        value.requires_grad_(False)", "'NAME' == key[:len('NAME')]",
    ),
    "filter": (
        "for n, p in filter(lambda pair: pair[0].startswith('NAME'), mN.named_parameters()):\n    p.requires_grad = False",
        "pair[0].startswith('NAME')",
    ),
    "continue": (
        "for n, p in mN.named_parameters():\n    if not n.startswith('NAME'):\n        continue\n    p.requires_grad = False",
        "not n.startswith('NAME')",
    ),
    "function that asks": (
        "def isN(name):\n    return name.startswith('NAME')\nfor n, p in mN.named_parameters():\n    if isN(n):\n"
        "        p.requires_grad = False", "isN(n)",
    ),
    "function that freezes": (
        "def offN(name, weight):\n    if name.startswith('NAME'):\n        weight.requires_grad = False\n"
        "for n, p in mN.named_parameters():\n    offN(n, p)", "name.startswith('NAME')",
    ),
    "function of the network": (
        "def freezeN(net, prefix):\n    for n, p in net.named_parameters():\n        if n.startswith(prefix):\n"
        "            setattr(p, 'requires_grad', False)\nfreezeN(mN, 'NAME')", "n.startswith(prefix)",
    ),
    "pair": ("for pair in mN.named_parameters():\n    if pair[0].startswith('NAME'):\n        pair[1].requires_grad = False", "pair[0].startswith('NAME')"),  # noqa: E501
    "enumerate": (
        "for i, (n, p) in enumerate(mN.named_parameters()):\n    if n.startswith('NAME'):\n        p.requires_grad = False",
        "n.startswith('NAME')",
    ),
    "several names": (
        "for n, p in mN.named_parameters():\n    for start in ['NAME', 'stem.']:\n        if n.startswith(start):\n"
        "            p.requires_grad = False", "n.startswith(start)",
    ),
    "modules": (
        "for n, m in mN.named_modules():\n    if n.startswith('NAME'):\n        for p in m.parameters():\n"
        "            p.requires_grad = False", "n.startswith('NAME')",
    ),
    "method by another name": (
        "listingN = mN.named_parameters\nfor n, p in listingN():\n    if n.startswith('NAME'):\n        p.requires_grad = False",
        "n.startswith('NAME')",
    ),
}  # fmt: skip
EACH = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({{"encoder": nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "head": nn.Linear(8, 1)}})
    def forward(self, x):
        return self.net["head"](self.net["encoder"](x))
{freezes}
for step in range(14):
    for net, opt in runs:
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
"""


def each_alone(name: str) -> str:
    parts = ["runs = []"]
    for i, (freeze, _) in enumerate(SPELLINGS.values()):
        numbered = re.sub(r"\b(m|items|frozen|table|is|off|freeze|listing)N\b", rf"\g<1>{i}", freeze)
        parts.append(f"m{i} = Net()\n{numbered}\nruns.append((m{i}, torch.optim.SGD(m{i}.parameters(), lr=0.01)))")
    return EACH.format(freezes="\n".join(parts)).replace("NAME", name)


@pytest.mark.parametrize(("name", "expected"), [("encoder.", "begin with `net.`"), ("module.net.encoder.", "Compare with names")])
def test_however_a_program_goes_over_names(tmp_path: Path, name: str, expected: str) -> None:
    found = said(tmp_path, each_alone(name))
    assert {each.code for each in found} == {"GG613"} and all(expected in each.fixes[0].title for each in found)
    wanted = [re.sub("N\\b", str(i), text.replace("NAME", name)) for i, (_, text) in enumerate(SPELLINGS.values())]
    assert sorted(each.culprit.text or "" for each in found if each.culprit is not None) == sorted(wanted)


@pytest.mark.parametrize("name", ["net.encoder.", "decoder."])
def test_freezes_by_names_that_are_there_or_nobodys(tmp_path: Path, name: str) -> None:
    assert said(tmp_path, each_alone(name)) == []
