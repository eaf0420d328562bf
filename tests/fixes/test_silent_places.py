"""Bugs that never raise: which rule tells them, at which expression, and that the sound twin is silent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.running import said


@dataclass(frozen=True)
class Pair:
    """A broken program, what is to be said of it, and what makes it sound."""

    code: str
    culprit: str | None  # text of the marked expression
    names: tuple[str, ...]  # what the headline tells
    source: str
    repair: tuple[str, str]  # text, and what stands there in the sound twin


TWO_TOWERS = """
{decorator}
def unit(t):
    return t / (t.norm(dim=-1, keepdim=True) + 1e-6)

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, a, b):
        return F.normalize(self.query(a), dim=-1) @ unit(self.document(b)).T

towers = Towers()
opt = torch.optim.Adam(towers.parameters(), lr=1e-3)
for it in range(30):
    scores = towers(torch.randn(7, 6), torch.randn(7, 5))
    seen = scores.argmax(1), towers.document(torch.randn(2, 5)).detach()  # looked at, and never part of the loss
    opt.zero_grad()
    F.cross_entropy(scores, torch.arange(7)).backward()
    opt.step()
"""

BARE_VALUES = """
class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x):
        code = self.enc(x)
        return self.dec(code.data)

coder = Coder()
opt = torch.optim.SGD(coder.parameters(), lr=0.1)
for it in range(30):
    x = torch.randn(8, 6)
    opt.zero_grad()
    F.mse_loss(coder(x), x).backward()
    opt.step()
"""

NUMBER_IN_A_DICT = """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.box, self.kind = nn.Linear(5, 4), nn.Linear(5, 3)

def objective(box, kind, n):
    parts = {"box": box.abs().mean(), "kind": F.cross_entropy(kind, torch.arange(n) % 3).item()}
    return sum(parts.values())

net = Detector()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(20):
    x = torch.randn(6, 5)
    opt.zero_grad()
    objective(net.box(x), net.kind(x), 6).backward()
    opt.step()
"""

ROUNDED_CODE = """
class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x):
        z = 4 * self.enc(x)
        return self.dec(torch.round(z))

model = Quantized()
opt = torch.optim.Adam(model.parameters())
for it in range(12):
    x = torch.randn(8, 6)
    opt.zero_grad()
    F.mse_loss(model(x), x).backward()
    opt.step()
"""

COPIED_LEARNER = """
import copy

class Meta:
    def __init__(self):
        self.net = nn.Linear(4, 1)
        self.opt = torch.optim.Adam(self.net.parameters())

    def adapted(self):
        learner = copy.deepcopy(self.net)
        return learner

    def turn(self, x):
        learner = self.adapted()
        loss = learner(x).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()

meta = Meta()
for it in range(12):
    meta.turn(torch.randn(5, 4))
"""

STEP_FIRST = """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters())
for it in range(12):
    loss = net(torch.randn(5, 4)).pow(2).mean()
    opt.zero_grad()
    opt.step()
    loss.backward()
"""

CLIP_FIRST = """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters())
for it in range(12):
    loss = net(torch.randn(5, 4)).pow(2).mean()
    opt.zero_grad()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    loss.backward()
    opt.step()
"""

COLD = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step // 1000)
for it in range(45):
    opt.zero_grad()
    net(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
    warm_up.step()
"""

REPLAYED_ACTION = """
actor, critic = nn.Linear(3, 2), nn.Linear(5, 1)
actor_opt, critic_opt = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())

def act(state):
    action = actor(state)
    return action.detach()

for it in range(16):
    state = torch.randn(8, 3)
    with torch.no_grad():
        target = critic(torch.cat([state, actor(state)], 1))
    critic_opt.zero_grad()
    F.mse_loss(critic(torch.cat([state, torch.randn(8, 2)], 1)), target).backward()
    critic_opt.step()
    value = critic(torch.cat([state, act(state)], 1))
    actor_opt.zero_grad()
    (-value.mean()).backward()
    actor_opt.step()
"""

WRAPPED_WEIGHTS = """
hyper, target = nn.Linear(3, 8), nn.Linear(4, 2, bias=False)
opt = torch.optim.Adam(hyper.parameters())

def run(weights, x):
    target.weight = nn.Parameter(weights)
    return target(x)

for it in range(16):
    out = run(hyper(torch.randn(3)).view(2, 4), torch.randn(5, 4))
    opt.zero_grad()
    out.pow(2).mean().backward()
    opt.step()
"""

ONE_HEAD = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.cat([self.heads[0](x) for head in self.heads], 1))

net = Heads()
opt = torch.optim.Adam(net.parameters())
for it in range(30):
    opt.zero_grad()
    net(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
"""

PAST_THE_SCALER = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for it in range(8):
    opt.zero_grad()
    scaler.scale(net(torch.randn(5, 4)).pow(2).mean()).backward()
    opt.step()
"""

ONE_ELEMENT = """
policy = nn.Linear(4, 3)
opt = torch.optim.SGD(policy.parameters(), lr=0.1)

def whitened(gain):
    return (gain - gain.mean()) / (gain.std() + 1e-8)

def objective(x, gain):
    gain = whitened(gain)
    chosen = policy(x).log_softmax(1)[:, 0]
    return -(chosen.exp() * gain).mean()

for n in [4, 4, 4, 4, 4, 1]:
    opt.zero_grad()
    objective(torch.randn(n, 4), torch.randn(n)).backward()
    opt.step()
"""

LEAK = """
maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
opt_m, opt_j = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1)
for it in range(12):
    made = maker(torch.randn(5, 3))
    verdict = F.softplus(-judge(torch.randn(5, 4))).mean() + F.softplus(judge(made.detach())).mean()
    verdict.backward()
    opt_j.step()
    opt_j.zero_grad()
    fooling = F.softplus(-judge(made)).mean()
    fooling.backward()
    opt_m.step()
    opt_m.zero_grad()
"""

PRYING = """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters())

def note(model):
    norm = sum(p.grad.norm() for p in model.parameters()).item()
    model.zero_grad()
    return norm

for it in range(12):
    opt.zero_grad()
    net(torch.randn(5, 4)).pow(2).mean().backward()
    note(net)
    opt.step()
"""

BARE_TABLE = """
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Embedding(6, 3), nn.Embedding(6, 3)

    def forward(self, a, b):
        return (self.left(a) * self.right.weight.data[b]).sum(-1)

model = Factors()
opt = torch.optim.Adam(model.parameters())
for it in range(30):
    a, b = torch.randint(0, 6, (8,)), torch.randint(0, 6, (8,))
    opt.zero_grad()
    model(a, b).pow(2).mean().backward()
    opt.step()
"""

ONCE_AN_EPOCH = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
curve = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=40)
for epoch in range(4):
    for it in range(10):
        opt.zero_grad()
        net(torch.randn(5, 4)).pow(2).mean().backward()
        opt.step()
    curve.step()
"""

SQUARED_RATE = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
decay = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1e-3 * 0.99**step)
for it in range(40):
    opt.zero_grad()
    net(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
    decay.step()
"""

NEVER_CALLED = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(12):
    opt.zero_grad()
    loss = net(torch.randn(5, 4)).pow(2).mean()
    loss.backward
    opt.step()
"""

OTHER_MASK = """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2)), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False))

net = Net()
opt = torch.optim.Adam(net.parameters())
for it in range(8):
    opt.zero_grad()
    net(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
"""

ALWAYS_DROPPING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(F.dropout(self.body(x).relu(), 0.4))

net = Net()
opt = torch.optim.Adam(net.parameters())
for epoch in range(3):
    net.train()
    for _ in range(5):
        opt.zero_grad()
        net(torch.randn(5, 4)).pow(2).mean().backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(5, 4))
"""

TABLE = """
critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.Adam(critic.parameters())

def objective(states, returns):
    values = critic(states)
    return 0.5 * (returns - values).pow(2).mean()

for it in range(8):
    opt.zero_grad()
    objective(torch.randn(6, 4), torch.randn(6)).backward()
    opt.step()
"""

PAIRS = {
    "a tower under no_grad": Pair(
        "GG605",
        "torch.no_grad()",
        ("towers.document", "never gets a gradient"),
        TWO_TOWERS.format(decorator="@torch.no_grad()"),
        ("@torch.no_grad()", ""),
    ),
    "bare values between two halves": Pair(
        "GG605", "code.data", ("coder.enc", ".data"), BARE_VALUES, ("code.data", "code")
    ),
    "a number among the terms": Pair(
        "GG308", "F.cross_entropy(kind, torch.arange(n) % 3).item()", ("`.item()`", "`F.cross_entropy(kind"), NUMBER_IN_A_DICT,
        (" % 3).item()", " % 3)"),
    ),
    "a code that is rounded": Pair(
        "GG304", "torch.round(z)", ("model.enc.weight", "`round`"), ROUNDED_CODE, ("torch.round(z)", "z + (torch.round(z) - z).detach()")
    ),
    "a copy is trained": Pair(
        "GG604", "learner = copy.deepcopy(self.net)", ("`self.net`", "`learner`"), COPIED_LEARNER, ("copy.deepcopy(self.net)", "self.net")
    ),
    "the step comes first": Pair(
        "GG602", "opt.step()", ("`opt.step()` runs before `loss.backward()`",), STEP_FIRST,
        ("    opt.step()\n    loss.backward()", "    loss.backward()\n    opt.step()"),
    ),
    "the clipping comes first": Pair(
        "GG610", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)", ("before backward()",), CLIP_FIRST,
        ("    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    loss.backward()\n",
         "    loss.backward()\n    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"),
    ),
    "a warm-up that stays cold": Pair(
        "GG611", "torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step // 1000)", ("`warm_up` keeps", "lr"), COLD,
        ("step // 1000", "(step + 1) / 1000"),
    ),
    "an actor that its loss does not reach": Pair(
        "GG606", "action.detach()", ("`actor_opt.step()` does nothing", "`.detach()`"), REPLAYED_ACTION,
        ("action.detach()", "action"),
    ),
    "weights wrapped into Parameters": Pair(
        "GG606", "target.weight = nn.Parameter(weights)", ("`hyper`", "made anew in each step"), WRAPPED_WEIGHTS,
        ("    target.weight = nn.Parameter(weights)\n    return target(x)", "    return F.linear(x, weights)"),
    ),
    "one head for all": Pair(
        "GG605", "self.heads[0](x)", ("`self.heads`", "`self.heads[0]`"), ONE_HEAD,
        ("self.heads[0](x)", "head(x)"),
    ),
    "a step past the scaler": Pair(
        "GG722", "opt.step()", ("`opt.step()`", "256 times too large", "`scaler`"), PAST_THE_SCALER,
        ("    opt.step()\n", "    scaler.step(opt)\n    scaler.update()\n"),
    ),
    "a reader of gradients that clears them": Pair(
        "GG602", "model.zero_grad()", ("`net.zero_grad()`", "before any step has used them"), PRYING,
        ("    model.zero_grad()\n    return", "    return"),
    ),
    "an embedding's bare table": Pair(
        "GG605", "return (self.left(a) * self.right.weight.data[b]).sum(-1)", ("`model.right.weight`", "`.data`"), BARE_TABLE,
        ("self.right.weight.data[b]", "self.right(b)"),
    ),
    "a curve over batches stepped once an epoch": Pair(
        "GG612", "curve.step()", ("`curve` was made for 40 steps", "4 times"), ONCE_AN_EPOCH, ("    curve.step()", "        curve.step()")
    ),
    "a rate for a factor": Pair(
        "GG612", "torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1e-3 * 0.99**step)", ("opt` was 1e-06 at most", "`decay`"),
        SQUARED_RATE,
        ("1e-3 * 0.99", "0.99"),
    ),
    "a backward that is only named": Pair(
        "GG606", "loss.backward", ("`opt.step()` does nothing",), NEVER_CALLED, ("loss.backward", "loss.backward()")
    ),
    "a mask drawn anew in backward": Pair(
        "GG712", "checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)", ("inner.1` will drop", "`Sequential`"),
        OTHER_MASK,
        (", preserve_rng_state=False", ""),
    ),
    "dropout that does not know of eval": Pair(
        "GG609", "F.dropout(self.body(x).relu(), 0.4)", ("`F.dropout` in `Net`", "eval mode"), ALWAYS_DROPPING,
        ("0.4))", "0.4 if self.training else 0.0))"),
    ),
    "a column against a row": Pair(
        "GG505", "returns - values", ("`values` is [6, 1]", "`returns` is [6]"), TABLE,
        ("values = critic(states)", "values = critic(states).squeeze(-1)"),
    ),
    "another network's gradients": Pair(
        "GG601", "fooling.backward()", ("`opt_j`", "`fooling.backward()`", "`judge`"), LEAK,
        ("    verdict.backward()\n    opt_j.step()\n    opt_j.zero_grad()\n",
         "    opt_j.zero_grad()\n    verdict.backward()\n    opt_j.step()\n"),
    ),
    "the deviation of one element": Pair(
        "GG501", "return (gain - gain.mean()) / (gain.std() + 1e-8)", ("`gain`", "NaN in its only element"), ONE_ELEMENT,
        ("gain.std()", "gain.std(unbiased=False)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("slug", PAIRS)
def test_the_place_is_named(slug: str, tmp_path: Path) -> None:
    pair = PAIRS[slug]
    found = said(tmp_path, pair.source)
    assert [diagnosis.code for diagnosis in found] == [pair.code]
    culprit = found[0].culprit
    assert culprit is not None and pair.culprit is not None
    assert culprit.text is not None and (culprit.text == pair.culprit or pair.culprit in culprit.text), culprit
    for name in pair.names:
        assert name in found[0].headline, found[0].headline


@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize("slug", PAIRS)
def test_the_repaired_program_is_silent(slug: str, level: str, tmp_path: Path) -> None:
    pair = PAIRS[slug]
    assert pair.source.count(pair.repair[0]) == 1
    assert said(tmp_path, pair.source.replace(*pair.repair), level) == []


DROPPED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = nn.Linear(4, 4), nn.Linear(4, 3)

net = Net()
opt = torch.optim.Adam(net.parameters())
for it in range(30):
    h = net.body(torch.randn(5, 4))
    guess = net.extra(h)
    right = (guess.argmax(1) == 0).float().mean()
    opt.zero_grad()
    h.pow(2).mean().backward()
    opt.step()
"""


def test_what_never_goes_into_the_loss_is_no_cut_on_the_way_to_it(tmp_path: Path) -> None:
    found = said(tmp_path, DROPPED)
    assert [diagnosis.code for diagnosis in found] == ["GG605"]
    assert found[0].culprit is None, "argmax is where a metric is computed, not where a path to the loss ends"


SOUND = {
    "a constant among terms, beside numbers that left torch": """
net = nn.Linear(4, 3)
opt = torch.optim.Adam(net.parameters())
right = [1, 1, 1]
for it in range(8):
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    logits = net(x)
    hit = logits.argmax(1) == y
    for c in range(3):
        right[c] += hit[y == c].sum().item()
    weight = torch.tensor([1.0 / n for n in right])
    floor = torch.tensor(0.1)
    loss = F.cross_entropy(logits, y, weight=weight) + floor + torch.tensor(1e-3) * len(x) / 6
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "gradients unscaled by hand, then clipped": """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for it in range(90):
    opt.zero_grad()
    scaler.scale(net(torch.randn(5, 4)).pow(2).mean()).backward()
    torch._foreach_div_([p.grad for p in net.parameters()], scaler.get_scale())
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
""",
    "tables of pairs that are meant": """
net, score = nn.Linear(4, 1), nn.Linear(4, 1)
centers = torch.linspace(-1, 1, 6)
bumps = nn.Linear(6, 1)
opt = torch.optim.Adam([*net.parameters(), *score.parameters(), *bumps.parameters()])
for it in range(8):
    x, rank = torch.randn(6, 4), torch.randn(6)
    radial = bumps((-(net(x) - centers) ** 2).exp())  # as many centers as rows, by chance
    flat = score(x).squeeze(-1)
    pairs = flat[:, None] - rank
    far = (x.pow(2).sum(1, keepdim=True) - net(x).squeeze(-1)).abs().mean()
    both = (score(x) - flat).abs().mean()
    opt.zero_grad()
    (radial.pow(2).mean() + pairs.abs().mean() + far + both).backward()
    opt.step()
""",
    "a trunk that two heads' losses train": """
trunk, left, right = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)
opt_t, opt_l, opt_r = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (trunk, left, right))
for it in range(12):
    x = torch.randn(5, 3)
    opt_t.zero_grad()
    opt_l.zero_grad()
    left(trunk(x)).pow(2).mean().backward()
    opt_l.step()
    opt_r.zero_grad()
    right(trunk(x)).abs().mean().backward()
    opt_r.step()
    opt_t.step()
""",
    "a judge that is cleared before its own backward": """
maker, judge = nn.Linear(3, 4), nn.Linear(4, 1)
opt_m, opt_j = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1)
for it in range(12):
    made = maker(torch.randn(5, 3))
    opt_j.zero_grad()
    F.softplus(-judge(torch.randn(5, 4))).mean().backward()
    F.softplus(judge(made.detach())).mean().backward()
    opt_j.step()
    opt_m.zero_grad()
    F.softplus(-judge(made)).mean().backward()
    opt_m.step()
""",
    "rounding that another loss makes up for": """
enc, dec = nn.Linear(6, 3), nn.Linear(3, 6)
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()])
for it in range(12):
    x = torch.randn(8, 6)
    z = enc(x)
    opt.zero_grad()
    F.mse_loss(dec(torch.round(4 * z)), x).backward(retain_graph=True)
    z.pow(2).mean().backward()
    opt.step()
""",
    "a scale undone by hand": """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for it in range(8):
    opt.zero_grad()
    scaler.scale(net(torch.randn(5, 4)).pow(2).mean()).backward()
    for p in net.parameters():
        p.grad.div_(scaler.get_scale())
    opt.step()
""",
    "an optimizer without a scaler beside one with": """
one, other = nn.Linear(4, 1), nn.Linear(4, 1)
first, second = torch.optim.SGD(one.parameters(), lr=1e-3), torch.optim.SGD(other.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for it in range(8):
    x = torch.randn(5, 4)
    first.zero_grad()
    second.zero_grad()
    scaler.scale(one(x).pow(2).mean()).backward()
    scaler.step(first)
    other(x).pow(2).mean().backward()
    second.step()
    scaler.update()
""",
    "a critic that is warmed up before its actor steps": """
actor, critic = nn.Linear(3, 2), nn.Linear(2, 1)
actor_opt, critic_opt = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for it in range(20):
    critic_opt.zero_grad()
    critic(torch.randn(8, 2)).pow(2).mean().backward()
    critic_opt.step()
    if it >= 12:
        actor_opt.zero_grad()
        critic(actor(torch.randn(8, 3))).mean().backward()
        actor_opt.step()
""",
    "clipping in the turns that have gradients": """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters())
for it in range(12):
    if it % 3 == 0:
        opt.zero_grad()
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    (net(torch.randn(5, 4)).pow(2).mean() / 3).backward()
    if it % 3 == 2:
        opt.step()
""",
    "a number logged and a constant added": """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters())
history = []
for it in range(12):
    loss = net(torch.randn(5, 4)).pow(2).mean()
    history.append(loss.item())
    opt.zero_grad()
    (loss - 0.125).abs().backward()
    opt.step()
""",
}


@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize("slug", SOUND)
def test_what_only_looks_like_it_is_silent(slug: str, level: str, tmp_path: Path) -> None:
    assert said(tmp_path, SOUND[slug], level) == []
