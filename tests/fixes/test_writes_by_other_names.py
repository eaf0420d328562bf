"""Writes into what a caller holds, into items of lists, and several refused writes in a row: the repair that is advised repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def said(folder: Path, source: str, level: str = "standard") -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level)]


def repaired(source: str, diagnosis: Diagnosis) -> str:
    patch = diagnosis.fixes[0].patch
    assert patch is not None, diagnosis.fixes
    return applied(HEAD + source, patch).removeprefix(HEAD)


HOOKED = """
from functools import partial

def watch(model, top):
    def cap(top, module, args, out):
        out.clamp_(max=top)
    return [m.register_forward_hook(partial(cap, top)) for m in model.modules() if isinstance(m, nn.Sigmoid)]

net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
watch(net, 0.5)
x = torch.randn(16, 4)
net(x).pow(2).mean().backward()
assert float(net[:2](x).detach().max()) <= 0.5
"""


def test_a_forward_hook_is_to_return_the_new_output(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, HOOKED)[0]
    assert diagnosis.code == "GG101" and diagnosis.fixes[0].safety == "safe"
    source = repaired(HOOKED, diagnosis)
    assert "        return out.clamp(max=top)\n" in source
    assert said(tmp_path, source) == []  # the program asserts that the cap still works


CALLED = """
class Cap:
    def __init__(self, top):
        self.top = top
    def __call__(self, module, args, out):
        out.clamp_(max=self.top)

net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
net[1].register_forward_hook(Cap(0.5))
net(torch.randn(16, 4)).pow(2).mean().backward()
"""


@pytest.mark.parametrize(("source", "line"), [(HOOKED, "out.clamp_(max=top)"), (CALLED, "out.clamp_(max=self.top)")])
@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_hook_that_is_a_partial_or_an_object_is_found(tmp_path: Path, level: str, source: str, line: str) -> None:
    diagnosis = said(tmp_path, source, level)[0]
    assert diagnosis.code == "GG101"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == line
    assert f"return {line.replace('_', '', 1)}" in repaired(source, diagnosis)


HELPED = """
def sharpen(probs, power):
    probs.pow_(power)

net = nn.Linear(4, 3)
p = net(torch.randn(8, 4)).softmax(-1)
sharpen(p, 2.0)
{use}p.log().mean().backward()
"""


def test_a_helper_without_a_result_is_not_told_to_rebind_its_parameter(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, HELPED.replace("{use}", ""))[0]
    assert diagnosis.code == "GG101"
    assert diagnosis.fixes[0].patch is None and diagnosis.fixes[0].safety == "manual"
    assert "return it from `sharpen`" in diagnosis.fixes[0].title


def test_a_helper_that_returns_its_parameter_may_rebind_it(tmp_path: Path) -> None:
    source = HELPED.replace("    probs.pow_(power)\n", "    probs.pow_(power)\n    return probs\n").replace(
        "sharpen(p, 2.0)", "p = sharpen(p, 2.0)"
    )
    source = source.replace("{use}", "")
    diagnosis = said(tmp_path, source)[0]
    assert "probs = probs.pow(power)" in repaired(source, diagnosis)
    assert said(tmp_path, repaired(source, diagnosis)) == []


LEVELS = """
convs = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
x = torch.randn(8, 4)
parts = [{act}(conv(x)) for conv in convs]
for i in range(2, 0, -1):
    parts[i - 1] += 0.5 * parts[i]
sum(part.pow(2).mean() for part in parts).backward()
"""


def test_an_item_of_a_list_is_replaced_by_a_new_tensor(tmp_path: Path) -> None:
    source = LEVELS.replace("{act}", "F.relu")
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.code == "GG101" and "writes over `parts[i - 1]`" in diagnosis.headline
    assert not any("parts.clone" in fix.title for fix in diagnosis.fixes)
    assert "parts[i - 1] = parts[i - 1] + (0.5 * parts[i])" in repaired(source, diagnosis)
    assert said(tmp_path, repaired(source, diagnosis)) == []


def test_items_that_nothing_saved_may_be_written(tmp_path: Path) -> None:
    assert said(tmp_path, LEVELS.replace("{act}", "nn.Identity()")) == []


STARTED = """
head = nn.Conv2d(2, 6, 1)
def start(head, away=0):
    b = head.bias.view(2, 3)
    b[:, 0] += 1.0
    b[:, 1:].mul_(0.5)
    print(away)
start(head)
head(torch.randn(1, 2, 4, 4)).mean().backward()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_writes_in_a_row_go_under_no_grad_together(tmp_path: Path, level: str) -> None:
    diagnosis = said(tmp_path, STARTED, level)[0]
    assert diagnosis.code == "GG104"
    source = repaired(STARTED, diagnosis)
    assert "    with torch.no_grad():\n        b[:, 0] += 1.0\n        b[:, 1:].mul_(0.5)\n    print(away)\n" in source
    assert said(tmp_path, source, level) == []
