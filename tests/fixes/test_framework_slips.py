"""Slips in the use of scalers, of swapped modules, of checkpoints under a framework: what is said, and that sound twins are silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source, said

SCALER = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for it in range(4):
    opt.zero_grad()
    scaler.scale(net(torch.randn(8, 4)).pow(2).mean()).backward()
{body}
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unscale", ["    scaler.unscale_(opt)\n", ""])
def test_update_that_was_not_reached(tmp_path: Path, level: str, unscale: str) -> None:
    body = unscale + "    scaler.step(opt)\n    if it < 2:\n        continue\n    scaler.update()"
    found = said(tmp_path, SCALER.format(body=body), level)
    assert [diagnosis.code for diagnosis in found] == ["GG722"], found
    assert found[0].culprit is not None and found[0].culprit.text == "scaler.update()"
    assert {"continue", "scaler.step(opt)"} <= {span.text for span in found[0].related}
    assert not found[0].avoid
    assert said(tmp_path, SCALER.format(body=unscale + "    scaler.step(opt)\n    scaler.update()"), level) == []


def test_update_that_is_nowhere(tmp_path: Path) -> None:
    found = said(tmp_path, SCALER.format(body="    scaler.unscale_(opt)\n    scaler.step(opt)"))
    assert [diagnosis.code for diagnosis in found] == ["GG722"]
    assert found[0].culprit is not None and found[0].culprit.text == "scaler.step(opt)"


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_parameters_cast_to_half_precision(tmp_path: Path, level: str) -> None:
    halved = SCALER.replace("opt =", "net.half()\nopt =").replace("torch.randn(8, 4)", "torch.randn(8, 4).half()")
    found = said(tmp_path, halved.format(body="    scaler.unscale_(opt)\n    scaler.step(opt)\n    scaler.update()"), level)
    assert [diagnosis.code for diagnosis in found] == ["GG722"]
    assert found[0].culprit is not None and found[0].culprit.text == "net.half()"


def test_a_scaler_without_gradients_names_the_cut_where_it_was_seen(tmp_path: Path) -> None:
    """An untraced step has not seen it, and the step that is refused is not the bug."""
    cut = SCALER.replace("net = ", "base = nn.Linear(4, 4)\nlow = torch.optim.SGD(base.parameters(), lr=0.01)\nnet = ")
    cut = cut.replace("net(torch.randn(8, 4))", "net(base(torch.randn(8, 4)).detach())")
    cut = cut.format(body="    scaler.step(opt)\n    scaler.step(low)\n    scaler.update()")
    [seen] = said(tmp_path, cut, "strict")
    assert seen.code == "GG302" and seen.culprit is not None and ".detach()" in seen.culprit.text
    [unseen] = said(tmp_path, cut, "watch")
    assert unseen.code == "GG722" and unseen.culprit is None
    assert [span.text for span in unseen.related] == ["scaler.step(low)"] and "not traced" in unseen.notes[0]


def test_unscaled_too_late(tmp_path: Path) -> None:
    found = said(tmp_path, SCALER.format(body="    scaler.step(opt)\n    scaler.unscale_(opt)\n    scaler.update()"))
    assert [diagnosis.code for diagnosis in found] == ["GG721"]
    assert "the step has used them already" in found[0].headline


GUARDED = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for it in range(6):
    x = torch.randn(8, 4)
    if it == 2:
        x[0, 0] = 1e30
    opt.zero_grad()
    scaler.scale(net(x).pow(2).mean()).backward()
{body}
"""
UNSCALE = "    scaler.unscale_(opt)\n    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
NAMED = "    if it >= 0:\n        scaler.unscale_(opt)\n        good = bool(torch.isfinite(net.weight.grad).all())\n"
STEP = "    scaler.step(opt)\n    scaler.update()\n"
LEFT_OUT = [
    (UNSCALE + "    if not torch.isfinite(norm):\n        print('left out')\n        continue\n" + STEP, "continue"),
    (UNSCALE + "    wrong = norm.isnan() or norm.isinf()\n    if wrong: continue\n" + STEP, "continue"),
    (NAMED + "    if not good:\n        continue\n" + STEP, "continue"),
    (UNSCALE + "    if norm < 1e6:\n        scaler.step(opt)\n        scaler.update()\n", "scaler.update()"),
]


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("body", "culprit"), LEFT_OUT)
def test_batch_that_is_left_out_before_the_update(tmp_path: Path, level: str, body: str, culprit: str) -> None:
    [told] = said(tmp_path, GUARDED.format(body=body), level)
    assert told.code == "GG721" and "update()" in told.headline and not told.avoid
    assert told.culprit is not None and told.culprit.text == culprit
    sound = body.replace("continue", "scaler.update(); continue").replace("        scaler.update()\n", "    scaler.update()\n")
    assert said(tmp_path, GUARDED.format(body=sound), level) == []


def test_patch_for_a_batch_that_is_left_out(tmp_path: Path) -> None:
    source = HEAD + GUARDED.format(body=LEFT_OUT[0][0])
    [(told, _)] = run_source(tmp_path, source)
    patch = told.fixes[0].patch
    assert patch is not None
    assert run_source(tmp_path, applied(source, patch)) == []


ACCUMULATED = [
    UNSCALE + "    if (it + 1) % 3:\n        continue\n" + STEP,
    UNSCALE + "    last = (it + 1) % 3 == 0\n    if last:\n        scaler.step(opt)\n        scaler.update()\n",
    UNSCALE + "    if it % 2 == 0: continue\n    if not torch.isfinite(norm): continue\n" + STEP,
]


@pytest.mark.parametrize("body", ACCUMULATED)
def test_unscaled_for_each_part_of_an_update(tmp_path: Path, body: str) -> None:
    [told] = said(tmp_path, GUARDED.format(body=body).replace("1e30", "1.0"))
    assert told.code == "GG721" and told.culprit is not None and told.culprit.text == "scaler.unscale_(opt)"
    assert told.avoid


CLIP = "    scaler.unscale_(opt)\n    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
EACH_THIRD = "    if it % 3 == 2:\n        scaler.step(opt)\n        scaler.update()\n"
NESTED = "    if it % 3 == 2:\n        with torch.no_grad():\n            scaler.step(opt)\n            scaler.update()\n"
LOOPED = "    for each in [opt]:\n        if it % 3 == 2:\n            scaler.step(each)\n            scaler.update()\n"
TURNS = [
    (CLIP + EACH_THIRD, " and the clipping after it into `if it % 3 == 2:`,"),
    (CLIP + "    if (it + 1) % 3:\n        continue\n" + STEP, " and the clipping after it"),
    ("    scaler.unscale_(opt)\n" + NESTED, " into `if it % 3 == 2:`,"),
]


@pytest.mark.parametrize(("body", "what"), TURNS)
def test_patch_that_moves_unscaling_to_the_step(tmp_path: Path, body: str, what: str) -> None:
    source = HEAD + GUARDED.format(body=body).replace("1e30", "1.0").replace("opt", "optim_a").replace("torch.optim_aim", "torch.optim")
    [(told, _)] = run_source(tmp_path, source)
    assert told.fixes[0].title == f"Move `scaler.unscale_(optim_a)`{what} right before `scaler.step(optim_a)`: once an update"
    patch = told.fixes[0].patch
    assert patch is not None
    repaired = applied(source, patch)
    assert repaired.index("unscale_") > repaired.index("if it % 3" if "if it % 3" in body else "continue")
    assert run_source(tmp_path, repaired) == []


@pytest.mark.parametrize(
    "body",
    [
        UNSCALE + EACH_THIRD + "    print(norm)\n",  # read in every turn
        "    scaler.unscale_(opt)\n" + LOOPED,
        "    scaler.unscale_(opt); nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n" + EACH_THIRD,
    ],
    ids=["read", "loop", "one line"],
)
def test_no_patch_where_moving_would_change_more(tmp_path: Path, body: str) -> None:
    [told] = said(tmp_path, GUARDED.format(body=body).replace("1e30", "1.0"))
    assert told.code == "GG721" and "`scaler.unscale_(opt)`" in told.fixes[0].title and told.fixes[0].patch is None


SCALED = """
class Trainer:
    def __init__(self):
        self.net = nn.Linear(4, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    def clip(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
    def step(self, it):
        self.opt.zero_grad()
        self.scaler.scale(self.net(torch.randn(8, 4)).pow(2).mean()).backward()
{body}
        self.scaler.update()
trainer = Trainer()
for it in range(6):
    trainer.step(it)
"""
ALONE = "        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)\n        self.scaler.step(self.opt)"
LATE = ALONE.replace("        self.scaler.step", "        self.scaler.unscale_(self.opt)\n        self.scaler.step")
GROUPS = """        for group in self.opt.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.scaler.step(self.opt)"""


@pytest.mark.parametrize("body", [ALONE, LATE], ids=["missing", "late"])
def test_patch_that_unscales_before_clipping(tmp_path: Path, body: str) -> None:
    source = HEAD + SCALED.format(body=body)
    [(told, _)] = run_source(tmp_path, source)
    assert told.code == "GG721" and "`self.scaler.unscale_(self.opt)` before" in told.fixes[0].title
    patch = told.fixes[0].patch
    assert patch is not None
    assert run_source(tmp_path, applied(source, patch)) == []


@pytest.mark.parametrize("body", [GROUPS, "        self.clip()\n        self.scaler.step(self.opt)"], ids=["loop", "helper"])
def test_no_patch_for_a_clipping_that_may_run_more_often(tmp_path: Path, body: str) -> None:
    [told] = said(tmp_path, SCALED.format(body=body))
    assert told.code == "GG721" and told.fixes[0].patch is None


def test_unscaled_twice_in_one_turn(tmp_path: Path) -> None:
    [told] = said(tmp_path, GUARDED.format(body=UNSCALE + UNSCALE + STEP))
    assert told.code == "GG721" and told.culprit is not None and told.culprit.text == "scaler.unscale_(opt)"
    assert "micro-batch" not in told.explanation


SWAP = """
import copy

class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

class Swap:
    def __init__(self, module):
        self.average = copy.deepcopy(module.net).requires_grad_(False)

    def before(self, module):
        self.raw = {kept}
        module.net = self.average

    def after(self, module):
        module.net = self.raw

def main():
    model = Lit()
    swap = Swap(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for it in range(30):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 5:
            swap.before(model)
            with torch.no_grad():
                model.eval()(x)
            swap.after(model)
            model.train()

main()
"""


def test_copy_that_is_put_back_in_place_of_the_trained_module(tmp_path: Path) -> None:
    found = said(tmp_path, SWAP.format(kept="copy.deepcopy(module.net)"))
    assert [diagnosis.code for diagnosis in found] == ["GG604"], [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and found[0].culprit.text == "module.net = self.raw"
    assert "`self.raw = module.net`" in found[0].fixes[0].title
    assert any(span.text == "self.raw = copy.deepcopy(module.net)" for span in found[0].related)
    assert said(tmp_path, SWAP.format(kept="module.net")) == []


REENTRANT = """
from torch.utils.checkpoint import checkpoint

net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
head = nn.Linear(4, 1)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.01)
for it in range(30):
    opt.zero_grad()
    head(checkpoint(net, torch.randn(8, 4), use_reentrant={how})).pow(2).mean().backward()
    opt.step()
"""


def test_parameters_cut_off_by_a_checkpoint_are_told_of_once(tmp_path: Path) -> None:
    assert {diagnosis.code for diagnosis in said(tmp_path, REENTRANT.format(how=True))} == {"GG711"}
    assert said(tmp_path, REENTRANT.format(how=False)) == []


MIXED = """
gen = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

def optimizers():
    return torch.optim.SGD(gen.parameters(), lr=0.01), torch.optim.SGD(critic.parameters(), lr=0.01)

def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def main():
    {targets} = optimizers()
    for _ in range(8):
        fake = gen(torch.randn(8, 2))
        update(opt_d, critic(fake.detach()).mean() - critic(torch.randn(8, 2)).mean())
        update(opt_g, -critic(fake).mean())

main()
"""


def test_two_optimizers_taken_for_each_other(tmp_path: Path) -> None:
    found = said(tmp_path, MIXED.format(targets="opt_d, opt_g"))
    assert found and found[0].code == "GG602", [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and found[0].culprit.text == "opt_d, opt_g = optimizers()"
    assert "`opt_g, opt_d`" in found[0].fixes[0].title and "Remove" not in found[0].fixes[0].title
    assert said(tmp_path, MIXED.format(targets="opt_g, opt_d")) == []


def test_zeroed_too_early_by_one_optimizer_is_no_mix_up(tmp_path: Path) -> None:
    source = """
a, b = nn.Linear(4, 4), nn.Linear(4, 1)
opt_a, opt_b = torch.optim.SGD(a.parameters(), lr=0.01), torch.optim.SGD(b.parameters(), lr=0.01)
for _ in range(8):
    loss = b(a(torch.randn(8, 4))).pow(2).mean()
    loss.backward()
    opt_a.step()
    opt_a.zero_grad()
    opt_b.zero_grad()
    opt_b.step()
"""
    found = said(tmp_path, source)
    assert all("optimizer of" not in diagnosis.headline for diagnosis in found)


COPY = """
import copy

net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
fast = torch.compile({what}, backend="eager")
for _ in range(30):
    x = torch.randn(8, 4)
    opt.zero_grad()
    (fast(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    opt.step()
"""


def test_compiled_copy_of_what_the_optimizer_holds(tmp_path: Path) -> None:
    found = said(tmp_path, COPY.format(what="copy.deepcopy(net)"))
    assert [diagnosis.code for diagnosis in found] == ["GG604"], [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and "copy.deepcopy(net)" in (found[0].culprit.text or "")
    assert said(tmp_path, COPY.format(what="net")) == []


ACCELERATE = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

for state in (AcceleratorState, GradientState, PartialState):
    state._reset_state()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps={steps})
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=4)
{prepared}
for x in loader:
    with accelerator.accumulate(net):
        accelerator.backward(net(x).pow(2).mean())
        opt.step()
        opt.zero_grad()
"""


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    state = pytest.importorskip("accelerate.state")
    yield
    for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
        kind._reset_state()


@pytest.mark.usefixtures("fresh_accelerate")
def test_optimizer_that_accelerate_was_not_given(tmp_path: Path) -> None:
    without = "net, loader = accelerator.prepare(net, loader)"
    found = said(tmp_path, ACCELERATE.format(steps=4, prepared=without))
    assert [diagnosis.code for diagnosis in found] == ["GG752"], [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and found[0].culprit.text == "accelerator.prepare(net, loader)"
    assert said(tmp_path, ACCELERATE.format(steps=1, prepared=without)) == []
    assert said(tmp_path, ACCELERATE.format(steps=4, prepared="net, opt, loader = accelerator.prepare(net, opt, loader)")) == []


def test_what_is_kept_in_a_dict_is_named(tmp_path: Path) -> None:
    source = """
net, kept = nn.Linear(4, 1), []
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(80):
    out = net(torch.randn(8, 4))
    loss = out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    kept.append({{"loss": loss{how}, "size": out.abs(){how}, "it": it}})
"""
    found = said(tmp_path, source.format(how=""))
    assert [diagnosis.code for diagnosis in found] == ["GG608"]
    assert found[0].fixes[0].title.startswith("Keep `loss` and `out.abs()`")
    assert said(tmp_path, source.format(how=".detach()")) == []
