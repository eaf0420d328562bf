"""Patches of silent bugs of the step protocol, in loops, functions and classes: put in as they are, they leave nothing to say."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.running import HEAD, applied, said

LOOP = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    x = torch.randn(8, 4)
    {body}
"""
TRAINER = """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.kept = None

    def update(self, x):
        {body}

trainer = Trainer()
for step in range(30):
    trainer.update(torch.randn(8, 4))
"""
FUNCTION = """
def update(model, optimizer, x):
    {body}

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    update(model, optimizer, torch.randn(8, 4))
"""
FORMS = {"loop": (LOOP, "", 4), "class": (TRAINER, "self.", 8), "function": (FUNCTION, "", 4)}

BODIES = {
    "GG601": """
        loss = {s}model(x).pow(2).mean()
        loss.backward()
        {s}optimizer.step()
    """,
    "GG602": """
        {s}optimizer.zero_grad()
        loss = {s}model(x).pow(2).mean()
        loss.backward()
        {s}optimizer.zero_grad()
        other = {s}model(x * 2).abs().mean()
        other.backward()
        {s}optimizer.step()
    """,
    "GG606": """
        {s}optimizer.zero_grad()
        {s}model(x).pow(2).mean().backward()
        {s}optimizer.step()
        {s}optimizer.step()
    """,
    "GG610": """
        {s}optimizer.zero_grad()
        {s}model(x).pow(2).mean().backward()
        {s}optimizer.step()
        nn.utils.clip_grad_norm_({s}model.parameters(), 1.0)
    """,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", BODIES)
def test_the_patch_repairs(code: str, form: str, tmp_path: Path) -> None:
    frame, own, width = FORMS[form]
    body = textwrap.indent(textwrap.dedent(BODIES[code]).strip(), " " * width).lstrip().format(s=own)
    assert_repaired(tmp_path, frame.format(body=body), code)


def assert_repaired(folder: Path, source: str, code: str, level: str = "standard") -> str:
    """The source with the first fix of the one finding in it, of which nothing is said any more."""
    found = said(folder, source, level)
    assert [diagnosis.code for diagnosis in found] == [code], [diagnosis.headline for diagnosis in found]
    fix = found[0].fixes[0]
    assert fix.patch is not None and fix.files and fix.reason, fix
    repaired = applied(HEAD + source, fix.patch)
    assert [diagnosis.headline for diagnosis in said(folder, repaired.removeprefix(HEAD), level)] == []
    return repaired


HEADS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x):
        {loop}

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    sum(part.pow(2).mean() for part in model(torch.randn(8, 4))).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("return [self.heads[0](x) for head in self.heads]", "[head(x) for head in self.heads]"),
        ("return [self.heads[1](x) for i in range(len(self.heads))]", "[self.heads[i](x) for i in range(len(self.heads))]"),
        (
            "parts = []\n        for i, head in enumerate(self.heads):\n            parts.append(self.heads[0](x))\n        return parts",
            "parts.append(head(x))",
        ),
    ],
)
def test_one_item_for_all(loop: str, expected: str, tmp_path: Path) -> None:
    assert expected in assert_repaired(tmp_path, HEADS.format(loop=loop), "GG605")


KEPT = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{before}
for step in range(120):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    {keep}
"""


@pytest.mark.parametrize(
    ("before", "keep", "expected"),
    [
        ("mean = 0.0", "mean = 0.9 * mean + 0.1 * loss", "mean = (0.9 * mean + 0.1 * loss).detach()"),
        ("kept = []", "kept.append(loss)", "kept.append(loss.detach())"),
        ("total = torch.zeros(())", "total += loss", "total += loss.detach()"),
        ("kept = []", "kept.append((step, loss))", None),  # what else is in it is not known to have `.detach()`
        ("kept = []", "kept.append({'loss': loss})", None),
    ],
)
def test_what_is_kept(before: str, keep: str, expected: str | None, tmp_path: Path) -> None:
    source = KEPT.format(before=before, keep=keep)
    if expected is not None:
        assert expected in assert_repaired(tmp_path, source, "GG608")
    else:
        (found,) = said(tmp_path, source)
        assert found.code == "GG608" and found.fixes[0].patch is None


LAYERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        {parts}

    def forward(self, x):
        {use}

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("parts", "use", "expected"),
    [
        ("self.rest = [nn.Linear(8, 8) for _ in range(2)]", "x = self.first(x)\n        for part in self.rest:\n            x = part(x)\n"
         "        return x", "self.rest = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])"),
        ("self.rest = {'a': nn.Linear(8, 8)}", "return self.rest['a'](self.first(x))", "nn.ModuleDict({'a': nn.Linear(8, 8)})"),
        ("self.scale = torch.ones(8, requires_grad=True)", "return self.first(x) * self.scale",
         "self.scale = nn.Parameter(torch.ones(8, requires_grad=True))"),
    ],
)  # fmt: skip
def test_what_no_module_knows(parts: str, use: str, expected: str, tmp_path: Path) -> None:
    assert expected in assert_repaired(tmp_path, LAYERS.format(parts=parts, use=use), "GG603")


OTHER_STEPS = """
actor, critic = nn.Linear(4, 1), nn.Linear(4, 1)
actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.01)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
for step in range(30):
    x = torch.randn(8, 4)
    actor_optimizer.zero_grad()
    actor(x).pow(2).mean().backward()
    actor_optimizer.step()
    critic_optimizer.zero_grad()
    critic(x).pow(2).mean().backward()
    {step}
"""


@pytest.mark.parametrize(
    ("step", "expected"),
    [("actor_optimizer.step()", "    critic_optimizer.step()\n"), ("critic_optimizer.step", "    critic_optimizer.step()\n"), ("pass", "")],
)
def test_the_step_of_the_other(step: str, expected: str, tmp_path: Path) -> None:
    found = assert_repaired(tmp_path, OTHER_STEPS.format(step=step), "GG607")
    assert found.count("critic_optimizer.step()") == 1 and expected in found


EVALUATED = """
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

{helper}
for epoch in range(6):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    {call}
"""


@pytest.mark.parametrize(
    ("helper", "call", "patched"),
    [
        ("", "with torch.no_grad():\n        for _ in range(4):\n            out = model(torch.randn(8, 4))", True),
        (
            "def check(net, x):\n    with torch.no_grad():\n        out = net(x)\n    return out.mean()",
            "print([check(model, torch.randn(8, 4)) for _ in range(4)])",
            True,
        ),
        (  # nothing can come after a return
            "@torch.no_grad()\ndef check(net, x):\n    return net(x)",
            "print([check(model, torch.randn(8, 4)) for _ in range(4)])",
            False,
        ),
    ],
)
def test_a_validation_in_train_mode(helper: str, call: str, patched: bool, tmp_path: Path) -> None:
    source = EVALUATED.format(helper=helper, call=call)
    if patched:
        repaired = assert_repaired(tmp_path, source, "GG609")
        assert ".eval()\n" in repaired and ".train()\n" in repaired
    else:
        (found,) = said(tmp_path, source)
        assert found.code == "GG609" and found.fixes[0].patch is None
