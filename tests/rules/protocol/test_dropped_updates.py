"""Updates that are computed and dropped, however they are written; and what computes the same and keeps it."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from gradguard.runtime.session import current_session
from tests.running import HEAD, applied, run_source, said

AVERAGED = """
import copy
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
slow = copy.deepcopy(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
{defs}
for step in range({steps}):
    x = torch.randn(8, 4)
    with torch.no_grad():
        goal = slow(x)
    opt.zero_grad()
    (F.mse_loss(net(x), goal) + F.cross_entropy(net(x), torch.arange(8) % 2)).backward()
    opt.step()
    if step >= {start}:
{update}
"""
# every update as a function, with a copy of its own
TOGETHER = """
import copy
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
{defs}
copies = [copy.deepcopy(net) for _ in range({count})]
for step in range({steps}):
    x = torch.randn(8, 4)
    opt.zero_grad()
    F.cross_entropy(net(x), torch.arange(8) % 2).backward()
    opt.step()
    for slow, update in zip(copies, UPDATES):
        update(slow, net, step)
"""
PAIRS = "zip(slow.parameters(), net.parameters())"
MIX = "@torch.no_grad()\ndef mix(a, b):\n    return 0.9 * a + 0.1 * b"

# the update, what is defined before, the text of the culprit (else the update's last line)
DROPPED: dict[str, tuple[str, str, str]] = {
    "loop": (f"with torch.no_grad():\n    for e, p in {PAIRS}:\n        e = 0.9 * e + 0.1 * p", "", ""),
    "loop with grad mode on": (f"for e, p in {PAIRS}:\n    e = 0.9 * e + 0.1 * p", "", ""),
    "through data": (f"for e, p in {PAIRS}:\n    e = 0.9 * e.data + 0.1 * p.data", "", ""),
    "part by part": (f"with torch.no_grad():\n    for k, q in {PAIRS}:\n        part = 0.9 * k\n        k = part + 0.1 * q", "", ""),
    "while": (
        f"pairs = iter({PAIRS})\nwith torch.no_grad():\n    while (pair := next(pairs, None)) is not None:\n        k, q = pair\n"
        "        k = torch.lerp(k, q, 0.1)", "", "",
    ),
    "comprehension": (f"with torch.no_grad():\n    new = [e + (p - e) * 0.1 for e, p in {PAIRS}]", "", ""),
    "map": ("with torch.no_grad():\n    list(map(lambda e, p: e.mul(0.9).add(p, alpha=0.1), slow.parameters(), net.parameters()))", "", ""),
    "helper": (f"for e, p in {PAIRS}:\n    e = mix(e, p)", MIX, ""),
    "setter": (f"for e, p in {PAIRS}:\n    put(e, mix(e, p))", MIX + "\ndef put(target, value):\n    target = value", "target = value"),
    "copy": (f"for e, p in {PAIRS}:\n    e = e.data.clone().mul_(0.9).add_(p.data, alpha=0.1)", "", ""),
    "state dict": ("sd = slow.state_dict()\nfor k, v in net.state_dict().items():\n    sd[k] = sd[k] * 0.9 + v * 0.1", "", ""),
    "dicts": (
        "mine, theirs = dict(slow.named_parameters()), dict(net.named_parameters())\nwith torch.no_grad():\n    for n in mine:\n"
        "        mine[n] = 0.9 * mine[n] + 0.1 * theirs[n]", "", "",
    ),
    "lists of tensors": (
        "with torch.no_grad():\n    new = torch._foreach_lerp(list(slow.parameters()), list(net.parameters()), 0.1)", "", "",
    ),
}  # fmt: skip


def averaged(update: str, defs: str = "", steps: int = 20, start: int = 0) -> str:
    return AVERAGED.format(update=indent(update, " " * 8), defs=defs, steps=steps, start=start)


def together(updates: list[str], defs: str, steps: int) -> str:
    functions = [f"def update_{i}(slow, net, step):\n{indent(update, '    ')}\n" for i, update in enumerate(updates)]
    listed = ", ".join(f"update_{i}" for i in range(len(updates)))
    return TOGETHER.format(defs="\n".join([defs, *functions, f"UPDATES = [{listed}]"]), count=len(updates), steps=steps)


def test_averages_that_are_dropped(tmp_path: Path) -> None:
    found = said(tmp_path, together([update for update, _, _ in DROPPED.values()], DEFS, 20))
    assert {each.code for each in found} == {"GG611"} and {each.confidence for each in found} == {"certain"}
    wanted = [culprit or update.splitlines()[-1].strip() for update, _, culprit in DROPPED.values()]
    assert sorted(each.culprit.text or "" for each in found if each.culprit is not None) == sorted(wanted)


@pytest.mark.parametrize("name", ["loop with grad mode on", "part by part", "while"])
def test_what_one_name_stands_for_is_written_by_that_name(tmp_path: Path, name: str) -> None:
    update, defs, _ = DROPPED[name]
    source = averaged(update, defs)
    (diagnosis,) = said(tmp_path, source)
    assert "`slow` stays as it is" in diagnosis.headline
    assert not run_source(tmp_path, applied(HEAD + source, diagnosis.fixes[0].patch or ""))


@pytest.mark.parametrize(("level", "steps"), [("watch", 45), ("strict", 20), ("forensic", 20)])
def test_at_other_levels(tmp_path: Path, level: str, steps: int) -> None:
    update = DROPPED["loop"][0]
    assert [each.code for each in said(tmp_path, averaged(update, steps=steps), level)] == ["GG611"]


def test_an_average_that_begins_late(tmp_path: Path) -> None:
    update = DROPPED["loop"][0]
    (diagnosis,) = said(tmp_path, averaged(update, steps=180, start=80))
    assert diagnosis.code == "GG611" and diagnosis.culprit is not None and diagnosis.culprit.text == update.splitlines()[-1].strip()


SOUND: dict[str, str] = {
    "written": f"with torch.no_grad():\n    for e, p in {PAIRS}:\n        e.copy_(0.9 * e + 0.1 * p)",
    "other memory": f"for e, p in {PAIRS}:\n    e.data = 0.9 * e.data + 0.1 * p.data",
    "loaded": "sd = slow.state_dict()\nfor k, v in net.state_dict().items():\n    sd[k] = sd[k] * 0.9 + v * 0.1\nslow.load_state_dict(sd)",
    "lists of tensors": f"ours, theirs = zip(*{PAIRS})\nwith torch.no_grad():\n    torch._foreach_copy_(ours, torch._foreach_lerp(ours, theirs, 0.1))",  # noqa: E501
    "new Parameters": "for (n, e), (_, p) in zip(list(slow.named_parameters()), net.named_parameters()):\n"
    "    owner, _, last = n.rpartition('.')\n    setattr(slow.get_submodule(owner), last, nn.Parameter((0.9 * e + 0.1 * p).detach()))",
    "a frozen teacher": "pass",
    "drift that is logged": f"with torch.no_grad():\n    drift = sum((e - p).norm() for e, p in {PAIRS}).item()",
    "drift that nothing reads": f"with torch.no_grad():\n    for e, p in {PAIRS}:\n        drift = e - p",
    "an average for evaluation": f"with torch.no_grad():\n    mixed = [0.5 * e + 0.5 * p for e, p in {PAIRS}]\nif step % 40 == 39:\n    sum(m.sum() for m in mixed)",  # noqa: E501
    "an average for evaluation, from a function": f"mixed = [mix(e, p) for e, p in {PAIRS}]\nif step % 40 == 39:\n    evaluate(mixed)",
    "in a dict": "for n, p in net.named_parameters():\n    shadow[n] = 0.9 * shadow.get(n, p.data) + 0.1 * p.data",
    "in a dict that is read now and then": f"for i, (e, p) in enumerate({PAIRS}):\n    shadow[i] = mix(e, p)\nif step % 40 == 39:\n    evaluate(list(shadow.values()))",  # noqa: E501
    "now and then": "if step % 10 == 9:\n    slow.load_state_dict(net.state_dict())",
    "torch's own": "average.update_parameters(net)",
    "in place": f"with torch.no_grad():\n    for e, p in {PAIRS}:\n        e.lerp_(p, 0.1)",
}
DEFS = (
    MIX + "\nshadow = {}\naverage = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)\n"
    "def put(target, value):\n    target = value\ndef evaluate(tensors):\n    return sum(t.sum() for t in tensors)"
)


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_averages_that_are_kept_are_silent(tmp_path: Path, level: str) -> None:
    assert not said(tmp_path, together(list(SOUND.values()), DEFS, 32), level)


BARE = """
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
{copy}
for step in range({steps}):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 2).backward()
    opt.step()
    if step >= {start}:
{update}
"""
BY_NAME = "shadow = {n: p.detach().clone() for n, p in net.named_parameters()}"
BY_PLACE = "shadow = [p.detach().clone() for p in net.parameters()]"
# how the copies are kept, the update; none of the copies is a Parameter
DROPPED_BARE = {
    "dict": ("shadow = {k: v.clone() for k, v in net.state_dict().items()}",
             "with torch.no_grad():\n    for k, v in net.state_dict().items():\n        s = shadow[k]\n        s = 0.99 * s + 0.01 * v"),
    "list": (BY_PLACE, "for a, p in zip(shadow, net.parameters()):\n    a.mul(0.99).add(p.detach(), alpha=0.01)"),
    "lerp": (BY_NAME, "with torch.no_grad():\n    for n, p in net.named_parameters():\n        torch.lerp(shadow[n], p, 0.01)"),
    "a copy of the copy": (BY_PLACE, "for a, p in zip(shadow, net.parameters()):\n    a.clone().mul_(0.99).add_(p.data, alpha=0.01)"),
}  # fmt: skip
KEPT_BARE = {
    "dict": (BY_NAME, "with torch.no_grad():\n    for n, p in net.named_parameters():\n        shadow[n] = 0.99 * shadow[n] + 0.01 * p"),
    "list": (BY_PLACE, "shadow = [0.99 * a + 0.01 * p.detach() for a, p in zip(shadow, net.parameters())]"),
    "in place": (BY_PLACE, "for a, p in zip(shadow, net.parameters()):\n    a.mul_(0.99).add_(p.detach(), alpha=0.01)"),
    "drift": (BY_PLACE, "drift = sum((a - p).norm() for a, p in zip(shadow, net.parameters())).item()"),
    "halfway": (BY_PLACE, "half = [0.5 * a + 0.5 * p.data for a, p in zip(shadow, net.parameters())]\nsum(h.sum() for h in half)"),
}


def bare(copy: str, update: str, steps: int = 40, start: int = 0) -> str:
    return BARE.format(copy=copy, update=indent(update, " " * 8), steps=steps, start=start)


@pytest.mark.parametrize(("copy", "update"), DROPPED_BARE.values(), ids=DROPPED_BARE)
def test_averages_of_copies_that_are_no_parameters(tmp_path: Path, copy: str, update: str) -> None:
    (diagnosis,) = said(tmp_path, bare(copy, update))
    assert diagnosis.code == "GG611" and "`shadow[" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == update.splitlines()[-1].strip()


def test_such_an_average_that_begins_late(tmp_path: Path) -> None:
    assert [each.code for each in said(tmp_path, bare(*DROPPED_BARE["dict"], steps=120, start=40))] == ["GG611"]


@pytest.mark.parametrize(("copy", "update"), KEPT_BARE.values(), ids=KEPT_BARE)
def test_copies_that_are_no_parameters_and_are_kept_or_read(tmp_path: Path, copy: str, update: str) -> None:
    assert said(tmp_path, bare(copy, update)) == []


ATTACHED = {
    "dict": (BY_NAME, "for n, p in net.named_parameters():\n    shadow[n] = 0.99 * shadow[n] + 0.01 * p"),
    "list": (BY_PLACE, "shadow = [torch.lerp(a, p, 0.01) for a, p in zip(shadow, net.parameters())]"),
    "object": (
        "class Average:\n    def __init__(self):\n        self.values = [p.clone() for p in net.parameters()]\n"
        "    def follow(self):\n        for i, p in enumerate(net.parameters()):\n"
        "            self.values[i] = self.values[i] * 0.99 + p * 0.01\naverage = Average()", "average.follow()",
    ),
}  # fmt: skip
CULPRITS = {"object": "self.values[i] = self.values[i] * 0.99 + p * 0.01"}
BOUNDED = {
    "a window": ("from collections import deque\nlast = deque(maxlen=4)", "last.append(net[0].weight * 2)\nmean = sum(last)"),
    "once and for all": ("first = net[0].weight * 2", "seen = first + net[0].weight"),
    "longer and longer": ("total = 0", "total = 0\nfor _ in range(step + 1):\n    total = total + net[0].weight"),
}


@pytest.mark.parametrize("name", ATTACHED)
def test_averages_that_keep_the_graphs_of_all_steps(tmp_path: Path, name: str) -> None:
    copy, update = ATTACHED[name]
    (diagnosis,) = said(tmp_path, bare(copy, update))
    assert diagnosis.code == "GG608" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == CULPRITS.get(name, update.splitlines()[-1].strip())


@pytest.mark.parametrize(("copy", "update"), BOUNDED.values(), ids=BOUNDED)
def test_graphs_that_do_not_grow_from_step_to_step(tmp_path: Path, copy: str, update: str) -> None:
    assert said(tmp_path, bare(copy, update, steps=70)) == []


BY_HAND = """
net = nn.Linear(4, 1)
{defs}
for step in range(30):
    x = torch.randn(16, 4)
    (net(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
{update}
    net.zero_grad()
"""
UPDATES: dict[str, tuple[str, str]] = {
    "loop": ("with torch.no_grad():\n    for p in net.parameters():\n        p = p - 0.1 * p.grad", ""),
    "loop with grad mode on": ("for p in net.parameters():\n    p = p - 0.1 * p.grad", ""),
    "a name of its own": ("with torch.no_grad():\n    for p in net.parameters():\n        new = p - 0.1 * p.grad", ""),
    "not bound": ("for p in net.parameters():\n    p.data.add(p.grad, alpha=-0.1)", ""),
    "comprehension": ("with torch.no_grad():\n    [p.sub(p.grad * 0.1) for p in net.parameters()]", ""),
    "while": ("ps = list(net.parameters())\nwhile ps:\n    p = ps.pop()\n    g = p.grad\n    p = p.detach() - 0.1 * g", ""),
    "given back": ("descended(net.parameters())", "def descended(ps):\n    return [p - 0.1 * p.grad for p in ps]"),
    "helper": (
        "for p in net.parameters():\n    descend(p, p.grad)", "def descend(weight, slope):\n    weight = weight.data - 0.1 * slope",
    ),
}  # fmt: skip


def by_hand(update: str, defs: str = "") -> str:
    return BY_HAND.format(update=indent(update, " " * 4), defs=defs)


@pytest.mark.parametrize(("update", "defs"), UPDATES.values(), ids=UPDATES)
def test_an_update_by_hand_that_is_dropped(tmp_path: Path, update: str, defs: str) -> None:
    source = by_hand(update, defs)
    (diagnosis,) = said(tmp_path, source)
    assert diagnosis.code == "GG611" and "`net` stays as it is" in diagnosis.headline
    dropping = update if "return" in defs else defs or update
    assert diagnosis.culprit is not None and diagnosis.culprit.text == dropping.splitlines()[-1].strip()
    patch = diagnosis.fixes[0].patch
    if patch is not None:
        assert not run_source(tmp_path, applied(HEAD + source, patch))


@pytest.mark.parametrize("level", ["standard", "watch"])
def test_updates_by_hand_that_are_kept_are_silent(tmp_path: Path, level: str) -> None:
    for update in (
        "for p in net.parameters():\n    p.data -= 0.1 * p.grad",
        "for p in net.parameters():\n    p.data = p.data - 0.1 * p.grad",
        "for n, p in list(net.named_parameters()):\n    setattr(net, n, nn.Parameter((p - 0.1 * p.grad).detach()))",
        "steps = [p - 0.1 * p.grad for p in net.parameters()]\nif step % 20 == 19:\n    print(steps[0].sum())",
        "kept = [p - 0.1 * p.grad for p in net.parameters()]\n"
        "if step % 20 == 19:\n    net.load_state_dict(dict(zip(net.state_dict(), kept)))",
        "ratio = max((0.1 * p.grad / p).abs().max().item() for p in net.parameters())",
        "torch.func.functional_call(net, {n: p - 0.1 * p.grad for n, p in net.named_parameters()}, (x,)).sum()",
    ):
        assert not said(tmp_path, by_hand(update), level), update  # each alone: whatever writes the parameters would excuse the others


ODD = """
net, table = nn.Linear(4, 2), nn.Embedding(6, 4, sparse=True)
def loss(w, x):
    return ((w * 0.5 + w.detach() * 0.5) @ x).sum()
for step in range(3):
    net(table(torch.arange(3))).sum().backward()
    torch.func.grad(loss)(net.weight, torch.ones(4))
    torch.func.vmap(lambda row: net.bias * 0.5 + row)(torch.ones(3, 2))
    with torch.inference_mode():
        half = 0.5 * net.weight
        other = torch.lerp(half, net.weight, 0.5)
    slope = table.weight.grad
    gone = -0.1 * slope
    meta = nn.Parameter(torch.empty(3, device="meta")) * 0.5
"""


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_tensors_of_odd_kinds_break_nothing(tmp_path: Path, level: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert said(tmp_path, ODD, level) == []
    assert "gradguard" not in capfd.readouterr().err


STRANGE = """
from torch.func import vmap, grad
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
sparse = torch.eye(3).to_sparse()
nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
for step in range(6):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    with torch.inference_mode():
        a = torch.ones(3) * 2
        a.clone().mul_(2).add_(a)
        torch.ones(2, 4).lerp_(net.weight, 0.1)
    twice = sparse * 2
    twice.add_(sparse.coalesce())
    twice.mul_(2)
    half = nested * 0.5
    half.add_(nested)
    vmap(lambda row: (row * 2).clone().add_(row))(torch.ones(4, 3))
    grad(lambda w: (w * 2).sum())(net.weight)
    meta = torch.ones(3, device="meta")
    meta.mul_(2).add_(meta.detach())
    shared = torch.ones(3)
    shared.add_(shared.detach())
"""


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_strange_tensors_are_left_alone(tmp_path: Path, level: str) -> None:
    session = current_session()
    session.faulty = False
    assert said(tmp_path, STRANGE, level) == [] and not session.faulty
