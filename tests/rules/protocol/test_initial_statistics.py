"""GG609: a copy in eval mode whose parameters follow a trained network, and whose running statistics are still the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source, said

SOURCE = """
import copy
def block():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8{options}), nn.ReLU(), nn.Linear(8, 3))

student = block()
{before}
teacher = copy.deepcopy(student).eval()
opt = torch.optim.SGD(student.parameters(), lr=0.05)
x, y = torch.randn(32, 6) * 2 + 3, torch.randint(0, 3, (32,))

{update}

{target}

for it in range({steps}):
    student.train()
    loss = F.cross_entropy(student(x), y) + F.mse_loss(student(x), target(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
    update()
"""
LOOP = """@torch.no_grad()
def update():
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(0.9).add_(s, alpha=0.1)
"""
DATA = """def update():
    for p_student, p_teacher in zip(student.parameters(), teacher.parameters()):
        p_teacher.data.copy_(0.9 * p_teacher.data + 0.1 * p_student.data)
"""
FOREACH = """def update():
    with torch.no_grad():
        torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)
"""
NO_GRAD = """def target(x):
    with torch.no_grad():
        return teacher(x)
"""
DETACHED = """def target(x):
    return teacher(x).detach()
"""
INFERENCE = """@torch.inference_mode()
def predict(x):
    return teacher(x)
def target(x):
    return predict(x).clone()
"""


def source(update: str = LOOP, target: str = NO_GRAD, before: str = "", options: str = "", steps: int = 30) -> str:
    return SOURCE.format(update=update, target=target, before=before, options=options, steps=steps)


@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
@pytest.mark.parametrize(("update", "target"), [(LOOP, NO_GRAD), (DATA, DETACHED), (FOREACH, INFERENCE)], ids=["loop", "data", "foreach"])
def test_moved_by_its_parameters_only(update: str, target: str, level: str, tmp_path: Path) -> None:
    (diagnosis,) = said(tmp_path, source(update, target), level)
    assert diagnosis.code == "GG609" and diagnosis.headline.startswith("`teacher` follows `student` by its parameters only")
    assert (
        diagnosis.culprit is not None and "`for b, s in zip(teacher.buffers(), student.buffers()): b.copy_(s)`" in diagnosis.fixes[0].title
    )
    written = {LOOP: "t.mul_(0.9)", DATA: "p_teacher.data.copy_(", FOREACH: "torch._foreach_lerp_("}[update]
    assert (diagnosis.culprit.text or "").startswith(written)
    if update != FOREACH:
        patch = diagnosis.fixes[0].patch
        assert patch is not None and "in zip(teacher.buffers(), student.buffers()):" in patch
        assert run_source(tmp_path, applied(HEAD + source(update, target), patch), level) == []


def test_evaluated_at_the_end_only(tmp_path: Path) -> None:
    text = source(target="def target(x):\n    return student(x).detach()") + "with torch.no_grad():\n    teacher(x)\n"
    (diagnosis,) = said(tmp_path, text)
    assert diagnosis.code == "GG609" and "`teacher` follows `student`" in diagnosis.headline


WHOLE = """@torch.no_grad()
def update():
    for t, s in zip(teacher.state_dict().values(), student.state_dict().values()):
        t.copy_(s)
"""
FLOATS = LOOP + "    for b, s in zip(teacher.buffers(), student.buffers()):\n        b.copy_(s) if b.is_floating_point() else None\n"
STILL = "def update():\n    pass\n"
CHECKED = "teacher = copy.deepcopy(student).eval()\nwith torch.no_grad():\n    teacher(torch.randn(4, 6))\n"
WARM = "for _ in range(5):\n    student(torch.randn(16, 6) + 1)\n"
LOADED = "student[1].running_mean.fill_(0.5)\n"


@pytest.mark.parametrize(
    "text",
    [
        source(update=WHOLE),
        source(update=FLOATS),
        source(update=STILL),  # a fixed random network
        source(before=WARM),
        source(before=LOADED),
        source(update=WHOLE, before=CHECKED, options=", momentum=None"),
        source(options=", track_running_stats=False"),
        source().replace("student.train()\n", "student.eval()\n"),  # both are affine layers
        source().replace("deepcopy(student).eval()", "deepcopy(student)"),
        source().replace("opt = ", "student[1].num_batches_tracked = teacher[1].num_batches_tracked = None\nopt = "),
    ],
    ids=["state", "floats", "fixed", "warm", "loaded", "cumulative", "untracked", "eval", "train", "uncounted"],
)
def test_statistics_that_are_meant(text: str, tmp_path: Path) -> None:
    assert [each for each in said(tmp_path, text) if "first running statistics" in each.headline] == []
