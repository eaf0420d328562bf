"""Training programs whose numbers go wrong, each with the rule that must speak and the line (`# CULPRIT`) it must name.

The first failure often comes late, in a step that is not traced at level standard."""

from __future__ import annotations

HEAD = """\
import math, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""

BROKEN: dict[str, tuple[str, str]] = {
    "acos": (
        "nonfinite-backward",
        """
class Rot(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
    def forward(self, x):
        v = F.normalize(self.net(x), dim=-1)
        return v
def angle(a, b):
    cos = (a * b).sum(-1)
    return torch.acos(cos.clamp(-1, 1))  # CULPRIT
model = Rot()
opt = torch.optim.Adam(model.parameters(), 1e-2)
x = torch.randn(16, 4)
for step in range(8):
    out = model(x)
    target = F.normalize(torch.randn(16, 3), dim=-1)
    if step == 5:
        target = out.detach().clone()
    loss = angle(out, target).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "pairdist": (
        "nonfinite-backward",
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.01)
def distances(z):
    diff = z[:, None] - z[None]
    return diff.pow(2).sum(-1).sqrt()  # CULPRIT
for step in range(3):
    z = net(torch.randn(8, 3))
    d = distances(z)
    loss = F.relu(1.0 - d).triu(1).sum()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "std_one": (
        "nonfinite-forward",
        """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(9):
    x = torch.randn(8, 3)
    group = torch.randint(0, 2, (8,))
    if step == 6:
        group = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])
    y = net(x).squeeze(1)
    spread = y[group == 1].std()  # CULPRIT
    loss = y.pow(2).mean() + 0.1 * spread
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "empty_mean": (
        "nonfinite-forward",
        """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(9):
    x = torch.randn(8, 3)
    labels = torch.randint(0, 2, (8,)) if step != 6 else torch.zeros(8, dtype=torch.long)
    scores = net(x).squeeze(1)
    pos = scores[labels == 1]
    loss = scores.pow(2).mean() - pos.mean()  # CULPRIT
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "masked_div": (
        "nonfinite-forward",
        """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
def masked_mse(pred, y, mask):
    err = (pred - y) ** 2
    return (err * mask).sum() / mask.sum()  # CULPRIT
for step in range(9):
    x, y = torch.randn(8, 3), torch.randn(8)
    mask = (torch.rand(8) > 0.3).float() if step != 6 else torch.zeros(8)
    loss = masked_mse(net(x).squeeze(1), y, mask)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "data_std": (
        "nonfinite-forward",
        """
def load():
    x = torch.randn(64, 5)
    x[:, 3] = 2.0
    x = (x - x.mean(0)) / x.std(0)  # CULPRIT
    return x, torch.randn(64, 1)
def main():
    x, y = load()
    net = nn.Linear(5, 1)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for i in range(4):
        loss = F.mse_loss(net(x[i*8:i*8+8]), y[i*8:i*8+8])
        opt.zero_grad(); loss.backward(); opt.step()
main()
""",
    ),
    "ignore_all": (
        "nonfinite-forward",
        """
net = nn.Linear(5, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for i in range(9):
    t = torch.randint(0, 4, (8,))
    t[torch.rand(8) < 0.3] = -100
    if i == 7: t[:] = -100
    loss = F.cross_entropy(net(torch.randn(8, 5)), t)  # CULPRIT
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "ctc": (
        "nonfinite-forward",
        """
net = nn.Linear(5, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for i in range(6):
    logp = net(torch.randn(6, 2, 5)).log_softmax(-1)
    target = torch.randint(1, 4, (2, 3)) if i != 4 else torch.full((2, 5), 2)
    loss = F.ctc_loss(logp, target, torch.tensor([6, 6]), torch.full((2,), target.shape[1]))  # CULPRIT
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "adam_eps0": (
        "nonfinite-backward",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 1)
    def forward(self, i):
        return self.head(self.emb(i).mean(1))
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3, eps=0)  # CULPRIT
for i in range(6):
    loss = net(torch.randint(0, 10, (2, 2))).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "where_div": (
        "nonfinite-backward",
        """
net = nn.Linear(3, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
def safe_ratio(a, b):
    return torch.where(b > 0, a / b, torch.zeros_like(a))  # CULPRIT
for step in range(3):
    h = F.relu(net(torch.randn(8, 3)))
    loss = safe_ratio(h[:, :2], h[:, 2:]).clamp(max=10).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "softplus_where": (
        "nonfinite-backward",
        """
net = nn.Linear(3, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
def softplus(x):
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))  # CULPRIT
for step in range(8):
    x = torch.randn(8, 3) * (1 if step != 5 else 300)
    loss = softplus(net(x)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "eigh": (
        "nonfinite-backward",
        """
cov = nn.Parameter(torch.eye(4))
opt = torch.optim.SGD([cov], 0.01)
for step in range(3):
    w, v = torch.linalg.eigh((cov + cov.t()) / 2)  # CULPRIT
    loss = (v[:, -1] @ torch.ones(4)).pow(2)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "neg_pow": (
        "nonfinite-forward",
        """
net = nn.Linear(3, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(8):
    gamma = net(torch.randn(8, 3)).abs() + (0.5 if step != 5 else -2.0)
    corrected = gamma ** 0.45  # CULPRIT
    loss = corrected.mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "unit": (
        "nonfinite-forward",
        """
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
opt = torch.optim.SGD(net.parameters(), 0.01)
def unit(z):
    return z / z.norm(dim=-1, keepdim=True)  # CULPRIT
for step in range(8):
    z = net(torch.randn(8, 3))
    loss = (unit(z) @ unit(z).t()).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "lr_big": (
        "exploding-gradient",
        """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=3.0)  # CULPRIT
    def fit(self, x, y):
        for _ in range(80):
            loss = ((self.model(x) - y) ** 2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
x = torch.randn(64, 6) * 4
Trainer().fit(x, x.sum(1, keepdim=True))
""",
    ),
    "dead_relu": (
        "vanishing-gradient",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 1)
        nn.init.constant_(self.fc1.bias, -30.0)
    def forward(self, x):
        h = torch.relu(self.fc1(x))  # CULPRIT
        return self.fc2(h)
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(120):
    x = torch.randn(32, 6)
    loss = ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "tanh_sat": (
        "vanishing-gradient",
        """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.mu = nn.Linear(32, 2)
    def forward(self, obs):
        return torch.tanh(self.mu(self.body(obs)))  # CULPRIT
net = Policy()
opt = torch.optim.Adam(net.parameters(), 1e-3)
for _ in range(150):
    obs = torch.rand(32, 6) * 40000 + 20000
    loss = ((net(obs) - 0.3) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "categorical": (
        "nonfinite-forward",
        """
from torch.distributions import Categorical
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Linear(4, 3)
    def forward(self, obs, mask):
        prefs = self.pi(obs)
        probs = prefs.softmax(-1) * mask
        probs = probs / probs.sum(-1, keepdim=True)  # CULPRIT
        return Categorical(probs=probs)
actor = Actor()
opt = torch.optim.Adam(actor.parameters(), 1e-2)
for step in range(8):
    obs = torch.randn(5, 4)
    mask = torch.ones(5, 3)
    if step == 6:
        mask[2] = 0
    dist = actor(obs, mask)
    a = dist.sample()
    loss = -(dist.log_prob(a) * torch.randn(5)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "multinomial": (
        "nonfinite-forward",
        """
net = nn.Linear(4, 3)
opt = torch.optim.Adam(net.parameters(), 1e-2)
def sample(p):
    return torch.multinomial(p, 1)
for step in range(8):
    scores = net(torch.randn(5, 4)) * (1 if step != 6 else 1e30)
    weights = torch.exp(scores)  # CULPRIT
    probs = weights / weights.sum(1, keepdim=True)
    a = sample(probs)
    loss = -probs.gather(1, a).clamp(min=1e-6).log().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "tanh_logprob": (
        "nonfinite-forward",
        """
net = nn.Linear(4, 2)
opt = torch.optim.Adam(net.parameters(), 1e-2)
def squashed_log_prob(u):
    a = torch.tanh(u)
    normal = -0.5 * u ** 2
    return (normal - torch.log(1 - a ** 2)).sum(-1)  # CULPRIT
for step in range(8):
    u = net(torch.randn(5, 4) * (1 if step != 6 else 50))
    loss = squashed_log_prob(u).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "gcn_degree": (
        "nonfinite-forward",
        """
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
    def forward(self, x, adj):
        deg = adj.sum(1)
        inv = deg.pow(-0.5)  # CULPRIT
        norm = inv[:, None] * adj * inv[None, :]
        return self.out(torch.relu(norm @ self.lin(x)))
net = GCN()
opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(7):
    adj = (torch.rand(6, 6) > 0.4).float()
    adj = ((adj + adj.t()) > 0).float()
    if step == 5:
        adj[2] = 0; adj[:, 2] = 0
    loss = F.cross_entropy(net(torch.randn(6, 4), adj), torch.randint(0, 2, (6,)))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "advantage": (
        "nonfinite-forward",
        """
net = nn.Linear(4, 2)
opt = torch.optim.Adam(net.parameters(), 1e-2)
def normalise(r):
    return (r - r.mean()) / r.std()  # CULPRIT
def loss_fn(logits, a, adv):
    return -(logits.log_softmax(-1).gather(1, a).squeeze(1) * adv).mean()
for step in range(8):
    n = 5 if step != 6 else 1
    rewards = torch.randn(n)
    adv = normalise(rewards)
    a = torch.randint(0, 2, (n, 1))
    loss = loss_fn(net(torch.randn(n, 4)), a, adv)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "bce_log": (
        "nonfinite-forward",
        """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
class LogLoss(nn.Module):
    def forward(self, p, y):
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # CULPRIT
crit = LogLoss()
for step in range(8):
    x = torch.randn(16, 4) * (1 if step != 6 else 300)
    p = torch.sigmoid(net(x))
    loss = crit(p, (x[:, :1] > 0).float())
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "variable_len": (
        "nonfinite-forward",
        """
rnn = nn.RNNCell(3, 8)
head = nn.Linear(8, 1)
opt = torch.optim.SGD([*rnn.parameters(), *head.parameters()], 0.01)
for step in range(9):
    T = 3 + step
    h = torch.zeros(4, 8)
    total = 0.0
    for t in range(T):
        h = rnn(torch.randn(4, 3), h)
        total = total + h.pow(2).mean()
    gate = head(h)
    energy = (gate + 5 if step != 7 else gate * 0).log()  # CULPRIT
    loss = total + energy.mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "deep_sigmoid": (
        "vanishing-gradient",
        """
class Deep(nn.Module):
    def __init__(self, n=24):
        super().__init__()
        layers = []
        for _ in range(n):
            layers += [nn.Linear(16, 16), nn.Sigmoid()]  # CULPRIT
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(16, 2)
    def forward(self, x):
        return self.head(self.body(x))  # CULPRIT
net = Deep()
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(120):
    x = torch.randn(32, 16)
    loss = F.cross_entropy(net(x), (x[:, 0] > 0).long())
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "infloss_masked_action": (
        "nonfinite-forward",
        """
from torch.distributions import Categorical
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    logits = net(torch.randn(5, 4))
    mask = torch.zeros(5, 3, dtype=torch.bool); mask[:, 2] = True
    logits = logits.masked_fill(mask, float('-inf'))
    logp = logits.log_softmax(-1)
    ent = -(logp.exp() * logp).sum(-1)  # CULPRIT
    loss = -logp[:, 0].mean() - 0.01 * ent.mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "gp_double": (
        "nonfinite-backward",
        """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, x):
        return self.net(x)
critic = Critic()
opt = torch.optim.Adam(critic.parameters(), 1e-3)
def penalty(real, fake):
    a = torch.rand(real.shape[0], 1)
    mix = (a * real + (1 - a) * fake).requires_grad_()
    g, = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    return ((g.pow(2).sum(1).sqrt() - 1) ** 2).mean()  # CULPRIT
for step in range(7):
    real, fake = torch.randn(8, 4), torch.randn(8, 4)
    if step == 5:
        with torch.no_grad(): critic.net[0].bias[:] = -50.
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "mdn": (
        "nonfinite-forward",
        """
class MDN(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi, self.mu, self.sigma = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)
    def forward(self, x):
        return self.pi(x).softmax(-1), self.mu(x), self.sigma(x).exp()
def nll(pi, mu, sigma, y):
    dens = torch.exp(-0.5 * ((y - mu) / sigma) ** 2) / sigma
    mix = (pi * dens).sum(-1)
    return -torch.log(mix).mean()  # CULPRIT
net = MDN()
opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(8):
    y = torch.randn(16, 1) * (1 if step != 5 else 500)
    loss = nll(*net(torch.randn(16, 3)), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "focal": (
        "nonfinite-backward",
        """
def focal(logits, y, gamma=0.5):
    p = torch.sigmoid(logits)
    pt = torch.where(y > 0.5, p, 1 - p)
    return ((1 - pt) ** gamma * -pt.clamp(min=1e-8).log()).mean()  # CULPRIT
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(8):
    x = torch.randn(16, 3) * (1 if step != 5 else 200)
    loss = focal(net(x), (net(x) > 0).float())
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "half_adam": (
        "nonfinite-backward",
        """
net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(24, 2)).half()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)  # CULPRIT
for step in range(6):
    i = torch.randint(0, 20, (8, 3))
    loss = F.cross_entropy(net(i).float(), torch.randint(0, 2, (8,)))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "nan_data": (
        "nonfinite-forward",
        """
import numpy as np
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = np.random.RandomState(0).randn(64, 4).astype('float32')
        self.x[17, 2] = np.nan
    def __len__(self): return 64
    def __getitem__(self, i): return torch.from_numpy(self.x[i]), torch.tensor([self.x[i, :2].sum()])
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for xb, yb in torch.utils.data.DataLoader(Rows(), batch_size=8):  # CULPRIT
    loss = F.mse_loss(net(xb), yb)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "logdet": (
        "nonfinite-forward",
        """
A = nn.Parameter(torch.randn(4, 4))
opt = torch.optim.SGD([A], 0.5)
for step in range(4):
    sign_bad = torch.logdet(A)  # CULPRIT
    loss = A.pow(2).sum() - sign_bad
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "inv_softplus": (
        "nonfinite-forward",
        """
raw = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))
opt = torch.optim.SGD([raw], 0.4)
def inverse(y):
    return torch.log(torch.expm1(y))  # CULPRIT
for step in range(12):
    loss = inverse(raw).pow(2).sum() + 3 * raw.sum()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "sum_reduction": (
        "exploding-gradient",
        """
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)  # CULPRIT
X = torch.randn(256, 10) * 3
Y = X.sum(1, keepdim=True)
for epoch in range(40):
    loss = F.mse_loss(net(X), Y, reduction="sum")
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "cosine": (
        "nonfinite-forward",
        """
def cosine(a, b):
    return (a * b).sum(-1) / (a.pow(2).sum(-1).sqrt() * b.pow(2).sum(-1).sqrt())  # CULPRIT
enc = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
opt = torch.optim.SGD(enc.parameters(), 0.01)
for step in range(6):
    a, b = torch.randn(8, 4), torch.randn(8, 4)
    if step == 4: a[3] = -1e4 * enc[0].weight.detach().sum(0)
    with torch.no_grad():
        if step == 4: enc[0].bias[:] = -100
    loss = 1 - cosine(enc(a), enc(b)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "entropy_log0": (
        "nonfinite-forward",
        """
class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1)
    def forward(self, x):
        w = torch.softmax(self.score(x).squeeze(-1) * 200, dim=-1)
        return w, (w.unsqueeze(-1) * x).sum(1)
def entropy(w):
    return -(w * torch.log(w)).sum(-1).mean()  # CULPRIT
m = Attn(); head = nn.Linear(4, 1)
opt = torch.optim.Adam([*m.parameters(), *head.parameters()], 1e-2)
for step in range(6):
    w, z = m(torch.randn(8, 5, 4))
    loss = head(z).pow(2).mean() + 0.1 * entropy(w)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "temperature": (
        "nonfinite-forward",
        """
class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.tau = 1.0
    def forward(self, x):
        return F.softmax(self.gate(x) / self.tau, dim=-1)  # CULPRIT
r = Router()
opt = torch.optim.SGD(r.parameters(), 0.1)
for step in range(10):
    r.tau = max(0.0, 1.0 - step / 6)
    loss = (r(torch.randn(8, 4)) ** 2).sum(-1).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "geomean": (
        "nonfinite-backward",
        """
net = nn.Linear(3, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(6):
    h = F.relu(net(torch.randn(8, 3)))
    g = h.prod(-1) ** 0.25  # CULPRIT
    loss = g.mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "nested_helper": (
        "nonfinite-forward",
        """
def safe_log(x):
    return torch.log(x)  # CULPRIT
class KL(nn.Module):
    def forward(self, p, q):
        return (p * (safe_log(p) - safe_log(q))).sum(-1).mean()
net = nn.Linear(4, 6); kl = KL()
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(8):
    p = F.one_hot(torch.randint(0, 6, (8,)), 6).float()
    if step < 5: p = p * 0.9 + 0.1 / 6
    loss = kl(net(torch.randn(8, 4)).softmax(-1), p)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    "bn_eval_var": (
        "nonfinite-forward",
        """
class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.ones(n))
    def forward(self, x):
        mu, sd = x.mean(0), x.std(0)  # CULPRIT
        return self.g * (x - mu) / sd
net = nn.Sequential(nn.Linear(3, 4), Norm(4), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
data = torch.randn(33, 3)
for xb in data.split(8):
    loss = net(xb).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
}
