"""Losses that get probabilities, log-probabilities or raw scores where they expect another of these; and what only looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, only, run_source, said

LOOP = """
{before}
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters())
for it in range(4):
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    z = net(x)
{body}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def program(body: str, before: str = "") -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return HEAD + LOOP.format(before=before, body=lines)


OWN_SOFTMAX = """
def own_softmax(z):
    e = (z - z.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)
"""
HEAD_MODULE = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Softmax(dim=-1)
    def forward(self, z):
        return self.last(z)
head, criterion = Head(), nn.CrossEntropyLoss()
"""
FUNCTION = """
class Soft(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        p = z.softmax(1)
        ctx.save_for_backward(p)
        return p
    @staticmethod
    def backward(ctx, g):
        p, = ctx.saved_tensors
        return p * (g - (g * p).sum(1, keepdim=True))
"""
TEACHER = "teacher = nn.Linear(4, 3)\n"

# the function that is told of, which argument of it, what it gets; the body (its last line holds the loss), what stands before
BROKEN: dict[str, tuple[str, str, str, str, str]] = {
    "ce_softmax": ("cross_entropy", "first argument", "probabilities", "loss = F.cross_entropy(z.softmax(1), y)", ""),
    "ce_module": ("cross_entropy", "first argument", "probabilities", "loss = criterion(head(z), y)", HEAD_MODULE),
    "ce_own": (
        "cross_entropy",
        "first argument",
        "probabilities",
        "loss = F.cross_entropy(own_softmax(z), y, label_smoothing=0.1)",
        OWN_SOFTMAX,
    ),
    "ce_clamped": (
        "cross_entropy",
        "first argument",
        "probabilities",
        "p = torch.softmax(z, 1).clamp(1e-6, 1)\nloss = F.cross_entropy(p, y)",
        "",
    ),
    "ce_function": ("cross_entropy", "first argument", "probabilities", "loss = F.cross_entropy(Soft.apply(z), y)", FUNCTION),
    "ce_mixture": (
        "cross_entropy",
        "first argument",
        "probabilities",
        "p = torch.stack([z.softmax(1), (z * 2).softmax(1)]).mean(0)\nloss = F.cross_entropy(p, y)",
        "",
    ),
    "ce_pixels": (
        "cross_entropy",
        "first argument",
        "probabilities",
        "p = z.softmax(1).view(3, 4, 3).permute(0, 2, 1)\nloss = F.cross_entropy(p, y.view(3, 4))",
        "",
    ),
    "ce_sigmoid": ("cross_entropy", "first argument", "probabilities", "loss = F.cross_entropy(torch.sigmoid(z), y)", ""),
    "ce_two_classes": (
        "cross_entropy",
        "first argument",
        "probabilities",
        "p = z[:, 0].sigmoid()\nloss = F.cross_entropy(torch.stack([1 - p, p], 1), y.clamp(max=1))",
        "",
    ),
    "ce_log_target": (
        "cross_entropy",
        "target",
        "log-probabilities",
        "t = teacher(x).log_softmax(1).detach()\nloss = F.cross_entropy(z, t)",
        TEACHER,
    ),
    "twice": ("log_softmax", "first argument", "probabilities", "loss = F.nll_loss(F.log_softmax(z.softmax(1), 1), y)", ""),
    "twice_by_hand": (
        "log_softmax",
        "first argument",
        "probabilities",
        "p = F.softmax(z, -1)\nloss = -(F.one_hot(y, 3) * p.log_softmax(-1)).sum(1).mean()",
        "",
    ),
    "nll_softmax": ("nll_loss", "first argument", "probabilities", "loss = F.nll_loss(F.softmax(z, dim=1), y)", ""),
    "nll_module": ("nll_loss", "first argument", "probabilities", "p = nn.Softmax(1)(z)\nloss = nn.NLLLoss()(p, y)", ""),
    "nll_logits": ("nll_loss", "first argument", "raw scores", "loss = F.nll_loss(z, y)", ""),
    "nll_logits_module": (
        "nll_loss",
        "first argument",
        "raw scores",
        "loss = nn.NLLLoss(reduction='sum')(z.view(4, 3, 3).reshape(12, 3), y)",
        "",
    ),
    "kl_softmax": (
        "kl_div",
        "first argument",
        "probabilities",
        "t = teacher(x).softmax(1).detach()\nloss = F.kl_div(z.softmax(1), t, reduction='batchmean')",
        TEACHER,
    ),
    "kl_module": (
        "kl_div",
        "first argument",
        "probabilities",
        "t = teacher(x).softmax(1).detach()\nloss = nn.KLDivLoss(reduction='batchmean')(own_softmax(z), t)",
        TEACHER + OWN_SOFTMAX,
    ),
    "kl_eps": (
        "kl_div",
        "first argument",
        "probabilities",
        "t = teacher(x).softmax(1).detach()\nloss = F.kl_div(z.softmax(1) + 1e-8, t, reduction='sum')",
        TEACHER,
    ),
    "kl_reversed": (
        "kl_div",
        "first argument",
        "probabilities",
        "t = teacher(x).softmax(1).detach()\nloss = F.kl_div(t, z.softmax(1), reduction='sum')",
        TEACHER,
    ),
    "kl_logits": (
        "kl_div",
        "first argument",
        "raw scores",
        "t = teacher(x).softmax(1).detach()\nloss = F.kl_div(z, t, reduction='sum')",
        TEACHER,
    ),
    "kl_log_target": (
        "kl_div",
        "target",
        "log-probabilities",
        "t = teacher(x).log_softmax(1).detach()\nloss = F.kl_div(z.log_softmax(1), t, reduction='sum')",
        TEACHER,
    ),
    "kl_log_target_module": (
        "kl_div",
        "target",
        "log-probabilities",
        "t = teacher(x).log_softmax(1).detach()\nloss = nn.KLDivLoss()(z.log_softmax(1), t)",
        TEACHER,
    ),
    "kl_target_said_log": (
        "kl_div",
        "target",
        "probabilities",
        "t = teacher(x).softmax(1).detach()\nloss = F.kl_div(z.log_softmax(1), t, reduction='sum', log_target=True)",
        TEACHER,
    ),
    "kl_raw_target": (
        "kl_div",
        "target",
        "numbers below 0",
        "t = teacher(x).detach()\nloss = F.kl_div(z.log_softmax(1), t, reduction='sum')",
        TEACHER,
    ),
    "bce_sigmoid": (
        "binary_cross_entropy_with_logits",
        "first argument",
        "probabilities",
        "loss = F.binary_cross_entropy_with_logits(torch.sigmoid(z[:, 0]), (y > 0).float())",
        "",
    ),
    "bce_module": (
        "binary_cross_entropy_with_logits",
        "first argument",
        "probabilities",
        "p = nn.Sigmoid()(z).squeeze()\nloss = nn.BCEWithLogitsLoss()(p, F.one_hot(y, 3).float())",
        "",
    ),
    "bce_clamped": (
        "binary_cross_entropy_with_logits",
        "first argument",
        "probabilities",
        "p = z.sigmoid().clamp(1e-4, 1 - 1e-4)[:, :1]\nloss = F.binary_cross_entropy_with_logits(p, (y > 0).float()[:, None])",
        "",
    ),
    "bce_signs": (
        "binary_cross_entropy_with_logits",
        "target",
        "numbers outside [0, 1]",
        "loss = nn.BCEWithLogitsLoss()(z[:, 0], (y > 0).float() * 2 - 1)",
        "",
    ),
    "poisson": ("poisson_nll_loss", "first argument", "rates", "loss = F.poisson_nll_loss(z[:, 0].exp(), y.float())", ""),
}


@pytest.mark.parametrize("slug", sorted(BROKEN))
def test_the_call_is_named(tmp_path: Path, slug: str) -> None:
    function, argument, kind, body, before = BROKEN[slug]
    source = program(body, before)
    found = [each for each, _ in run_source(tmp_path, source)]
    assert found and found[0].code == "GG506", [each.headline for each in found]
    assert f"`{function}` expects" in found[0].headline
    assert argument in found[0].headline and found[0].headline.endswith(f"gets {kind}")
    last = source.splitlines().index("    " + body.splitlines()[-1]) + 1
    assert found[0].culprit is not None and found[0].culprit.line == last
    assert {each.code for each in found} == {"GG506"}


@pytest.mark.parametrize("slug", ["ce_softmax", "nll_softmax", "nll_logits", "kl_softmax", "kl_log_target", "bce_sigmoid"])
def test_the_first_fix_repairs(tmp_path: Path, slug: str) -> None:
    _, _, _, body, before = BROKEN[slug]
    source = program(body, before)
    fix = run_source(tmp_path, source)[0][0].fixes[0]
    assert fix.patch, fix.title
    assert not run_source(tmp_path, applied(source, fix.patch))


SOUND: dict[str, tuple[str, str]] = {
    "plain": ("loss = F.cross_entropy(z, y, label_smoothing=0.1) + F.nll_loss(F.log_softmax(z, 1), y)", ""),
    "log_softmax twice": ("loss = F.cross_entropy(z.log_softmax(1), y)", ""),
    "log of a mixture": ("p = (z.softmax(1) + (2 * z).softmax(1)) / 2\nloss = F.nll_loss(p.log(), y)", ""),
    "probabilities scaled": ("loss = F.cross_entropy(z.softmax(1) * 10, y)", ""),
    "scale of probabilities is learned": ("loss = F.cross_entropy(z.sigmoid() * scale, y)", "scale = nn.Parameter(torch.tensor(8.0))\n"),
    "temperature": (
        "t = (teacher(x) / 2).softmax(1).detach()\nloss = F.kl_div((z / 2).log_softmax(1), t, reduction='batchmean') * 4",
        TEACHER,
    ),
    "log target": ("loss = F.kl_div(z.log_softmax(1), teacher(x).log_softmax(1).detach(), log_target=True, reduction='sum')", TEACHER),
    "eps in the log": ("t = teacher(x).softmax(1).detach()\nloss = F.kl_div((z.softmax(1) + 1e-4).log(), t, reduction='sum')", TEACHER),
    "Jensen-Shannon": (
        "p, q = z.softmax(1), teacher(x).softmax(1).detach()\nm = ((p + q) / 2).log()\n"
        "loss = F.kl_div(m, p, reduction='sum') + F.kl_div(m, q, reduction='sum')",
        TEACHER,
    ),
    "logsumexp by hand": ("loss = z.logsumexp(1).mean() + F.nll_loss(z, y)", ""),
    "log densities": (
        "d = -0.5 * ((x[:, None, :3] - means) * 4).pow(2).sum(2) + 3.0\nloss = F.nll_loss(d, y) + z.sum() * 0",
        "means = nn.Parameter(torch.randn(3, 3))\n",
    ),
    "contrastive": (
        "s, n = F.normalize(z, dim=1) @ F.normalize(x[:, :3], dim=1).T * 10, torch.arange(12)\n"
        "loss = F.cross_entropy(s, n) + F.cross_entropy(s.T, n)",
        "",
    ),
    "focal": ("ce = F.cross_entropy(z, y, reduction='none')\nloss = ((1 - (-ce).exp()) ** 2 * ce).mean()", ""),
    "attention twice": ("a = (z.softmax(1) @ z.T).softmax(1).softmax(1)\nloss = F.cross_entropy(a @ z, y)", ""),
    "entropy": ("p = z.softmax(1)\nloss = F.cross_entropy(z, y) - 0.1 * -(p * z.log_softmax(1)).sum(1).mean()", ""),
    "cosines": ("loss = F.cross_entropy(F.normalize(z, dim=1), y)", ""),
    "uniform mixture weights": (
        "w = F.log_softmax(weights / 1.0, 0)\nloss = -(w + z.log_softmax(1).mean(0)).logsumexp(0)",
        "weights = nn.Parameter(torch.ones(3) / 3)\n",
    ),
    "soft targets": ("loss = F.cross_entropy(z, teacher(x).softmax(1).detach())", TEACHER),
    "advantages": ("loss = F.cross_entropy(z, F.one_hot(y, 3) * torch.randn(12, 1))", ""),
    "noisy labels": ("loss = F.binary_cross_entropy_with_logits(z[:, 0], torch.rand(12) * 0.5 + 0.7)", ""),
    "ignored labels": (
        "t = torch.where(y == 0, 255.0, y.float() - 1)\n"
        "loss = (F.binary_cross_entropy_with_logits(z[:, 0], t, reduction='none') * (t <= 1)).mean()",
        "",
    ),
    "gate of a score": ("loss = F.binary_cross_entropy_with_logits(z[:, 0].sigmoid() * z[:, 1], (y > 0).float())", ""),
    "bce": ("loss = F.binary_cross_entropy(z[:, 0].sigmoid(), (y > 0).float())", ""),
    "only logged": ("with torch.no_grad():\n    seen = F.cross_entropy(z.softmax(1), y)\nloss = F.cross_entropy(z, y)", ""),
    "logged with its graph": ("seen = F.cross_entropy(z.softmax(1), y)\nloss = F.cross_entropy(z, y)", ""),
    "actions": ("loss = (F.nll_loss(z.log_softmax(1), y, reduction='none') * torch.randn(12)).mean()", ""),
    "masked logits": ("m = torch.tensor([False, False, True])\nloss = F.cross_entropy(z.masked_fill(m, -torch.inf), y.clamp(max=1))", ""),
    "poisson": ("loss = F.poisson_nll_loss(z[:, 0], y.float()) + F.poisson_nll_loss(z[:, 0].exp(), y.float(), log_input=False)", ""),
    "vmap": ("loss = torch.vmap(lambda a, b: F.cross_entropy(a, b))(z, y).mean()", ""),
}


@pytest.mark.parametrize("slug", sorted(SOUND))
def test_what_is_meant_is_silent(tmp_path: Path, slug: str) -> None:
    found = run_source(tmp_path, program(*SOUND[slug]), "strict")
    assert not [each for each, _ in found if each.code.startswith("GG5")], found[0][0].headline


REFUSED = {
    "scores for probabilities": ("loss = F.binary_cross_entropy(net(x), y)", "F.binary_cross_entropy(net(x), y)"),
    "scores for probabilities, as a module": ("loss = nn.BCELoss()(net(x), y)", "nn.BCELoss()(net(x), y)"),
    "scores for probabilities, in a helper": ("""
def criterion(scores, wanted):
    return F.binary_cross_entropy(input=scores, target=wanted)

loss = criterion(net(x), y)""", "F.binary_cross_entropy(input=scores, target=wanted)"),
    "labels of -1": ("loss = F.binary_cross_entropy(net(x).sigmoid(), 2 * y - 1)", "F.binary_cross_entropy(net(x).sigmoid(), 2 * y - 1)"),
    "a column of class numbers": (
        "loss = F.cross_entropy(many(x), torch.zeros(8, 1).long())", "F.cross_entropy(many(x), torch.zeros(8, 1).long())"
    ),
    "a column of class numbers, as a module": (
        "numbers = torch.zeros(8, 1).long()\nloss = nn.CrossEntropyLoss()(many(x), numbers)", "nn.CrossEntropyLoss()(many(x), numbers)"
    ),
    "a column for nll_loss": ("loss = F.nll_loss(many(x).log_softmax(1), torch.zeros(8, 1).long())",
                              "F.nll_loss(many(x).log_softmax(1), torch.zeros(8, 1).long())"),
}  # fmt: skip


@pytest.mark.parametrize("level", ["watch", "standard"])
@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_numbers_that_a_loss_refuses_are_named(tmp_path: Path, program: tuple[str, str], level: str) -> None:
    source, culprit = program
    head = "net, many = nn.Linear(4, 1), nn.Linear(4, 3)\nx, y = 3 * torch.randn(8, 4), (torch.arange(8) % 2).float()[:, None]\n"
    diagnosis = only(tmp_path, head + source + "\nloss.backward()\n", "GG506", culprit, level)
    assert diagnosis.severity == "error"
    patch = diagnosis.fixes[0].patch
    if patch is not None:
        repaired = applied(HEAD + head + source + "\nloss.backward()\n", patch)
        assert run_source(tmp_path, repaired, level) == []


def test_a_refused_loss_of_nan_is_told_by_where_the_nan_comes_from(tmp_path: Path) -> None:
    source = "net = nn.Linear(4, 1)\nloss = F.binary_cross_entropy((net(torch.ones(8, 4)) * 0 - 1).sqrt(), torch.ones(8, 1))\n"
    assert [diagnosis.code for diagnosis in said(tmp_path, source)] == ["GG501"]
