"""More bugs that never raise, each with its place and a sound twin: losses that nobody adds, values that nobody trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixes.test_silent_places import Pair, said
from tests.running import HEAD, run_source

UNADDED = """
class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high, self.coarse = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.low(x).relu()
        return self.high(h), self.coarse(h)

def losses(outputs, y):
    fine, coarse = outputs
    first = F.cross_entropy(fine, y)
    second = F.cross_entropy(coarse, y) * 0.4
    total = first
    return total, {"first": first.item(), "second": second.TAKEN}

net = Segmenter()
opt = torch.optim.Adam(net.parameters())
for it in range(30):
    total, logs = losses(net(torch.randn(8, 5)), torch.arange(8) % 3)
    opt.zero_grad()
    total.backward()
    opt.step()
"""

HOOKED = """
from collections import defaultdict

class Watcher:
    def __init__(self, model):
        self.seen, self.counts = defaultdict(list), {}
        for name, part in model.named_children():
            part.register_forward_hook(self.hook(name))

    def hook(self, name):
        def keep(part, inputs, output):
            self.counts[name] = self.counts.get(name, 0) + 1
            KEEP
        return keep

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
watcher = Watcher(net)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(80):
    opt.zero_grad()
    net(torch.randn(6, 4)).pow(2).mean().backward()
    opt.step()
"""

TWO_FACTORS = """
class Adapted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(2, 5))
        self.up = nn.Parameter(torch.zeros(6, 2))

    def forward(self, x):
        return self.inner(x) + 2 * F.linear(F.linear(x, self.down), self.up)

net = nn.Sequential(Adapted(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 2))
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
for it in range(12):
    loss = F.cross_entropy(net(torch.randn(7, 5)), torch.arange(7) % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

GATED = """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        nn.init.zeros_(self.last.weight)
        self.gate = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return x + self.gate * self.last(self.inner(x).relu())

net = nn.Sequential(Gated(), nn.Linear(5, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(12):
    loss = F.cross_entropy(net(torch.randn(7, 5)), torch.arange(7) % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

SWITCHED = """
class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye, self.verdict = nn.Linear(4, 6), nn.Linear(6, 1)
        self.eye.requires_grad_(False)

    def forward(self, x):
        return self.verdict(torch.tanh(self.eye(x)))

def switch(part, on):
    for p in part.parameters():
        p.requires_grad_(on)

maker, judge = nn.Linear(3, 4), Judge()
opt_m, opt_j = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
for it in range(20):
    made = maker(torch.randn(8, 3))
    switch(PART, True)
    opt_j.zero_grad()
    (judge(made.detach()).mean() - judge(torch.randn(8, 4)).mean()).backward()
    opt_j.step()
    switch(judge, False)
    opt_m.zero_grad()
    (-judge(made).mean()).backward()
    opt_m.step()
"""

DENSITY = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.share, self.center = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x):
        return F.log_softmax(self.share(x), -1), self.center(x)

net = Mixture()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(3):
    x, y = torch.randn(32, 2), torch.linspace(0, 13.6, 32)[:, None]
    share, center = net(x)
    centers = 0 * center
    part = share - 0.5 * (y - centers) ** 2
    loss = -LOG.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

PAIRS = {
    "the logarithm of a density next to zero": Pair(
        "GG502", "torch.log(part.exp().sum(-1))", ("`torch.log(part.exp().sum(-1))`",),
        DENSITY.replace("LOG", "torch.log(part.exp().sum(-1))"),
        ("torch.log(part.exp().sum(-1))", "torch.logsumexp(part, -1)"),
    ),
    "a switch that unfreezes": Pair(
        "GG613", "p.requires_grad_(on)", ("`judge.eye.weight`", "`opt_j` was made"),
        SWITCHED.replace("PART", "judge"),
        ("switch(judge, True)", "switch(judge.verdict, True)"),
    ),
    "two factors that are both zero": Pair(
        "GG304", "self.down = nn.Parameter(torch.zeros(2, 5))", (".down` and", ".up` are both zero"), TWO_FACTORS,
        ("torch.zeros(2, 5)", "0.1 * torch.randn(2, 5)"),
    ),
    "a gate of zero before a layer of zero": Pair(
        "GG304", "self.gate = nn.Parameter(torch.zeros(5))", (".gate` and", ".last.weight` are both zero"), GATED,
        ("nn.init.zeros_(self.last.weight)", "pass"),
    ),
    "outputs that a hook appends to a list in a dict": Pair(
        "GG608", "self.seen[name].append(output)", ("`self.seen`",), HOOKED.replace("KEEP", "self.seen[name].append(output)"),
        ("append(output)", "append(output.detach())"),
    ),
    "outputs that a hook adds to a list in a dict": Pair(
        "GG608", "self.seen[name] += [output, output.mean()]", ("`self.seen`",),
        HOOKED.replace("KEEP", "self.seen[name] += [output, output.mean()]"),
        ("[output, output.mean()]", "[output.detach()]"),
    ),
    "outputs that a hook keeps beside plain values": Pair(
        "GG608", "self.seen.setdefault(name, []).append((it, output))", ("`self.seen`",),
        HOOKED.replace("KEEP", "self.seen[name + '.mean'].append(output.mean().item()); "
                               "\n            self.seen.setdefault(name, []).append((it, output))"),
        ("(it, output)", "(it, output.detach())"),
    ),
    "a loss of which only the number is taken": Pair(
        "GG605", "F.cross_entropy(coarse, y) * 0.4", ("`net.coarse`", "`second`, which is never added"),
        UNADDED.replace("TAKEN", "item()"),
        ("total = first", "total = first + second"),
    ),
    "a loss that is only logged": Pair(
        "GG605", "F.cross_entropy(coarse, y) * 0.4", ("`net.coarse`", "`second`, which is never added"),
        UNADDED.replace("TAKEN", "detach()"),
        ("total = first", "total = first + second"),
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


def test_a_number_that_is_no_loss_is_not_to_be_added_to_it(tmp_path: Path) -> None:
    source = UNADDED.replace("TAKEN", "item()").replace("F.cross_entropy(coarse, y) * 0.4", "coarse.norm()")
    [found] = said(tmp_path, source)
    assert found.code == "GG605" and found.culprit is None


def test_a_loss_that_has_a_backward_of_its_own(tmp_path: Path) -> None:
    source = UNADDED.replace("TAKEN", "item()").replace(
        "    total = first\n", "    total = first\n    sharp = torch.autograd.grad(second, coarse, retain_graph=True)[0].norm()\n"
    )
    [found] = said(tmp_path, source)
    assert found.code == "GG605" and found.culprit is None


DERIVED = """
net = nn.Linear(3, 1)
opt = torch.optim.Adam(net.parameters())
for it in range(30):
    x = torch.randn(8, 3, requires_grad=True)
    slope = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)[0]
    opt.zero_grad()
    slope.pow(2).mean().backward()
    opt.step()
"""


def test_a_loss_of_derivatives_in_a_training_before_does_not_count(tmp_path: Path) -> None:
    assert not said(tmp_path, DERIVED)
    source = UNADDED.replace("TAKEN", "item()").replace("F.cross_entropy(coarse, y) * 0.4", "coarse.norm()")
    [found] = said(tmp_path, source)
    assert found.code == "GG605" and found.culprit is None


WHOLE = """
class Lengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.size = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.body(x)
        guess = F.softplus(self.size(h)).squeeze(-1)
        MAKE
        return h, sizes

net = Lengths()
opt = torch.optim.Adam(net.parameters())
for it in range(6):
    h, sizes = net(torch.randn(8, 4))
    loss = h.pow(2).mean() + F.mse_loss(sizes.float(), torch.full((8,), 2.0))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("make", "before"),
    [
        ("sizes = torch.clamp(torch.round(guess), min=1).long()", "`guess`, in front of the rounding"),
        ("sizes = guess.floor().clamp(min=1).long()", "`guess`, in front of the rounding"),
        ("whole = torch.ceil(guess * 2); sizes = whole.long()", "`guess * 2`, in front of the rounding"),
        ("sizes = guess.long()", "`guess` themselves"),
    ],
)
def test_the_repair_begins_in_front_of_the_rounding(make: str, before: str, tmp_path: Path) -> None:
    found = next(each for each in said(tmp_path, WHOLE.replace("MAKE", make)) if each.code == "GG308")
    assert before in found.fixes[0].title


ROLLOUT = """
from torch.distributions import Categorical

class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Linear(4, 3)

    def forward(self, s):
        return Categorical(logits=self.pi(s))

@torch.no_grad()
def play(actor):
    s = torch.randn(8, 4)
    d = actor(s)
    return s, d.sample(), d.entropy()

actor = Actor()
value = nn.Linear(4, 1)
opt = torch.optim.Adam([*actor.parameters(), *value.parameters()])
for it in range(6):
    s, a, h = play(actor)
    LOSS
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_rollout_may_stay_without_a_graph(tmp_path: Path) -> None:
    again = ROLLOUT.replace("LOSS", "loss = -actor(s).log_prob(a).mean() - 0.1 * h.mean()")
    [found] = said(tmp_path, again)
    assert found.code == "GG308" and "`play` may stay under `torch.no_grad()`" in found.fixes[0].title
    only = ROLLOUT.replace("LOSS", "loss = value(s).pow(2).mean() - 0.1 * h.mean()")
    [found] = [each for each in said(tmp_path, only) if each.code == "GG308"]
    assert found.fixes[0].title.startswith("Remove `@torch.no_grad()`")
    assert said(tmp_path, ROLLOUT.replace("LOSS", "d = actor(s); loss = -d.log_prob(a).mean() - 0.1 * d.entropy().mean()")) == []


NORMS = """
net, heads = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)
opt = torch.optim.Adam([*net.parameters(), *heads.parameters()])
logged = []

def norms(losses):
    for loss in losses:
        (g,) = torch.autograd.grad(loss, net[0].weight)
        USE

for it in range(4):
    out = heads(net(torch.randn(5, 4)))
    losses = [out[:, 0].pow(2).mean(), out[:, 1].abs().mean()]
    norms(losses)
    opt.zero_grad()
    sum(losses).backward()
    opt.step()
"""


@pytest.mark.parametrize(("use", "kept"), [("logged.append(g.norm().item())", False), ("logged.append(g)", True)])
def test_gradients_that_are_only_looked_at(use: str, kept: bool, tmp_path: Path) -> None:
    [(found, _)] = run_source(tmp_path, HEAD + NORMS.replace("USE", use))
    assert found.code == "GG202" and "retain_graph=True" in found.fixes[0].title
    assert any("create_graph=True" in fix.title for fix in found.fixes) == kept, "only where the result may go into a loss"
    assert said(tmp_path, NORMS.replace("USE", use).replace("weight)", "weight, retain_graph=True)")) == []


@pytest.mark.parametrize(
    "change",
    [
        ("self.eye.requires_grad_(False)", "self.requires_grad_(False)"),  # all of it was off when the optimizer was made
        ("self.eye.requires_grad_(False)", "pass"),  # none of it was
        ("opt_m, opt_j =", "judge.requires_grad_(True)\nopt_m, opt_j ="),
        ("    switch(judge, True)", "    switch(judge.eye, it >= 2)\n    switch(judge.verdict, True)"),  # unfrozen by a switch of its own
    ],
)
def test_switches_that_mean_it(change: tuple[str, str], tmp_path: Path) -> None:
    source = SWITCHED.replace("PART", "judge")
    assert source.count(change[0]) == 1
    assert said(tmp_path, source.replace(*change)) == []


REWRAPPED = """
body, first, second = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
opt = torch.optim.Adam([*body.parameters(), *first.parameters(), *second.parameters()])
for it in range(30):
    x = torch.randn(8, 4)
    h = torch.relu(body(x))
    numbers = [float(v) for v in second(h).squeeze(-1)]
    again = WRAP
    loss = F.mse_loss(first(h).squeeze(-1), x[:, 0]) + 0.5 * F.mse_loss(again, x[:, 1])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("wrap", ["torch.tensor(numbers)", "torch.FloatTensor(numbers)", "torch.Tensor(numbers)"])
def test_a_term_that_was_shown_is_not_missed_once_more_at_the_end(wrap: str, tmp_path: Path) -> None:
    [found] = said(tmp_path, REWRAPPED.replace("WRAP", wrap))
    assert found.code == "GG308" and found.culprit is not None and found.culprit.line > 0
    assert said(tmp_path, REWRAPPED.replace("WRAP", "second(h).squeeze(-1)")) == []
    other = REWRAPPED.replace("WRAP", wrap).replace("+ 0.5 * F.mse_loss(again, x[:, 1])", "+ 0 * it")
    assert [each.code for each in said(tmp_path, other)] == ["GG605"], "no term was shown: what is missing is still told"
