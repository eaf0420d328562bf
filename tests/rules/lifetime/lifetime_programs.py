"""Small training programs with a second backward, each with the line an expert would call the bug (`# <<`) and what must be said.

The marks are taken out before a program runs.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
"""


class Program(NamedTuple):
    """One program: its rule, its source, and names that the message must hold."""

    slug: str
    code: str
    source: str
    names: tuple[str, ...] = ()


CARRIED = [
    Program(
        "hand_written_rnn",
        "GG203",
        """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(9, 6)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], dim=1)))

def main():
    cell, head = Cell(), nn.Linear(6, 3)
    opt = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    hidden = torch.zeros(4, 6)
    for batch in range(3):
        x = torch.randn(5, 4, 3)
        outputs = []
        for t in range(5):
            hidden = cell(x[t], hidden)  # <<
            outputs.append(head(hidden))
        loss = F.mse_loss(torch.stack(outputs), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
""",
        ("hidden",),
    ),
    Program(
        "mean_of_a_loss_kept_by_a_module",
        "GG203",
        """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, value):
        if self.mean is None:
            self.mean = value
        else:
            self.mean = 0.8 * self.mean + 0.2 * value  # <<
        return value / self.mean + value

def main():
    net, criterion = nn.Linear(3, 1), Scaled()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for it in range(4):
        loss = criterion(net(torch.randn(5, 3)).pow(2).mean())
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
""",
        ("`self.mean` of `Scaled`",),
    ),
    Program(
        "retained_and_then_updated",
        "GG203",
        """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 5), nn.Linear(5, 2)
        self.memory = (torch.zeros(1, 4, 5), torch.zeros(1, 4, 5))

    def forward(self, x):
        seen, self.memory = self.cell(x, self.memory)  # <<
        return self.out(seen)

def main():
    reader = Reader()
    opt = torch.optim.Adam(reader.parameters())
    for it in range(4):
        loss = F.cross_entropy(reader(torch.randn(6, 4, 3)).flatten(0, 1), torch.randint(0, 2, (24,)))
        opt.zero_grad()
        loss.backward(retain_graph=True)
        opt.step()
main()
""",
        ("`self.memory` of `Reader`", "opt.step()", "reader.cell."),
    ),
    Program(
        "state_through_a_step_function",
        "GG203",
        """
rnn, head = nn.GRU(3, 5), nn.Linear(5, 2)
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()])

def train_step(x, y, h):
    out, h = rnn(x, h)  # <<
    loss = F.mse_loss(head(out), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return h

h = None
for i in range(3):
    h = train_step(torch.randn(6, 2, 3), torch.randn(6, 2, 2), h)  # <<
""",
        ("h",),
    ),
    Program(
        "state_in_a_module",
        "GG203",
        """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTMCell(3, 4)
        self.hidden = None

    def forward(self, x):
        self.hidden = self.rnn(x, self.hidden)  # <<
        return self.hidden[0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader = Reader()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.reader(x))

model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(2, 3)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("self.hidden", "Reader"),
    ),
    Program(
        "state_of_a_trainer",
        "GG203",
        """
class Trainer:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.context = torch.zeros(2, 4)

    def step(self, x, y):
        out = self.net(torch.cat([x, self.context], 1))
        loss = F.mse_loss(out, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.context = out  # <<
        return loss.item()

trainer = Trainer(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4)))
for i in range(3):
    trainer.step(torch.randn(2, 3), torch.randn(2, 4))
""",
        ("self.context", "Trainer"),
    ),
    Program(
        "prototypes_after_the_step",
        "GG203",
        """
encoder = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
center = torch.zeros(4)
for it in range(4):
    features = encoder(torch.randn(8, 5))
    loss = (features - center).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    center = 0.9 * center + 0.1 * features.mean(0)  # <<
""",
        ("center", "features"),
    ),
    Program(
        "list_of_outputs",
        "GG203",
        """
net = nn.Sequential(nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 3), nn.Sigmoid())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
history = []
for it in range(4):
    out = net(torch.randn(2, 3))
    history.append(out)  # <<
    loss = torch.stack(history[-2:]).var()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("history", "out"),
    ),
    Program(
        "node_memory_written_by_index",
        "GG203",
        """
class NodeMemory:
    def __init__(self, n, d):
        self.table = torch.zeros(n, d)

    def read(self, ids):
        return self.table[ids]

    def write(self, ids, values):
        table = self.table.clone()
        table[ids] = values
        self.table = table  # <<

updater, decoder = nn.GRUCell(3, 4), nn.Linear(4, 1)
opt = torch.optim.Adam([*updater.parameters(), *decoder.parameters()])
memory = NodeMemory(10, 4)
for it in range(3):
    ids = torch.randperm(10)[:6]
    new = updater(torch.randn(6, 3), memory.read(ids))
    loss = decoder(new).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    memory.write(ids, new)  # <<
""",
        ("NodeMemory", "table"),
    ),
    Program(
        "previous_prediction",
        "GG203",
        """
def train(net, opt):
    previous = None
    for it in range(4):
        x = torch.randn(4, 3)
        prediction = net(x)
        loss = (prediction - x).pow(2).mean()
        if previous is not None:
            loss = loss + 0.1 * (prediction - previous).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        previous = prediction  # <<

net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
train(net, torch.optim.SGD(net.parameters(), lr=0.1))
""",
        ("previous", "prediction"),
    ),
    Program(
        "state_in_a_dataclass",
        "GG203",
        """
from dataclasses import dataclass

@dataclass
class State:
    h: torch.Tensor
    c: torch.Tensor

cell, head = nn.LSTMCell(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)

def advance(x, state):
    h, c = cell(x, (state.h, state.c))
    return State(h, c)

state = State(torch.zeros(2, 4), torch.zeros(2, 4))
for it in range(3):
    state = advance(torch.randn(2, 3), state)  # <<
    loss = head(state.h).pow(2).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("state",),
    ),
    Program(
        "refreshed_now_and_then",
        "GG203",
        """
net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(4, 3)
for it in range(6):
    if it % 3 == 0:
        anchor = net(x)  # <<
    loss = (net(x + 0.1) - anchor).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("anchor",),
    ),
    Program(
        "segment_memories_in_a_list",
        "GG203",
        """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x, mem):
        full = x if mem is None else torch.cat([mem, x], 1)
        k, v = self.kv(full).chunk(2, -1)
        return x + F.scaled_dot_product_attention(self.q(x), k, v)

class XL(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, mems):
        new = []
        for layer, mem in zip(self.layers, mems):
            new.append(x)
            x = layer(x, mem)
        return x, new

model = XL()
opt = torch.optim.Adam(model.parameters())
mems = [None, None]
for segment in range(3):
    x = torch.randn(2, 5, 4)
    out, mems = model(x, mems)  # <<
    loss = F.mse_loss(out, x)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("mems",),
    ),
    Program(
        "running_mean_in_a_buffer",
        "GG203",
        """
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)
        self.register_buffer("running", torch.zeros(4))

    def forward(self, x):
        z = self.lin(x).exp()
        self.running = 0.9 * self.running + 0.1 * z.mean(0)  # <<
        return z - self.running

model = Centered()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for it in range(3):
    loss = model(torch.randn(5, 3)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("self.running", "Centered"),
    ),
    Program(
        "global_state",
        "GG203",
        """
context = None
net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def forward(x):
    global context
    y = net(x if context is None else x + context)
    context = y  # <<
    return y

for it in range(3):
    loss = forward(torch.randn(2, 3)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("context",),
    ),
    Program(
        "critic_and_actor_over_one_state",
        "GG203",
        """
core, actor, critic = nn.GRUCell(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
opt = torch.optim.Adam([*core.parameters(), *actor.parameters(), *critic.parameters()])
belief = torch.zeros(2, 4)
for it in range(3):
    obs = torch.randn(2, 3)
    belief = core(obs, belief)  # <<
    dist = torch.distributions.Categorical(logits=actor(belief))
    action = dist.sample()
    value = critic(belief).squeeze(1)
    loss = (value - 1).pow(2).mean() - (dist.log_prob(action) * (1 - value.detach())).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("belief",),
    ),
]

ACCUMULATED = [
    Program(
        "sum_written_out",
        "GG204",
        """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
running = torch.zeros(())
for it in range(4):
    x = torch.randn(5, 3)
    loss = net(x).pow(2).mean()
    running = running + loss  # <<
    opt.zero_grad()
    running.backward()
    opt.step()
""",
        ("running",),
    ),
    Program(
        "list_of_losses",
        "GG204",
        """
def fit(net, opt):
    losses = []
    for it in range(4):
        loss = F.mse_loss(net(torch.randn(5, 3)), torch.randn(5, 1))
        losses.append(loss)  # <<
        opt.zero_grad()
        total = torch.stack(losses).mean()  # <<
        total.backward()
        opt.step()

net = nn.Linear(3, 1)
fit(net, torch.optim.SGD(net.parameters(), lr=0.1))
""",
        ("losses",),
    ),
    Program(
        "sum_of_a_list",
        "GG204",
        """
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for it in range(4):
    losses.append(net(torch.randn(5, 3)).pow(2).mean())  # <<
    objective = sum(losses) / len(losses)  # <<
    opt.zero_grad()
    objective.backward()
    opt.step()
""",
        ("losses",),
    ),
    Program(
        "sum_in_an_attribute",
        "GG204",
        """
class Meter:
    def __init__(self, net):
        self.net = net
        self.total = 0.0

    def update(self, x):
        self.total += self.net(x).pow(2).mean()  # <<
        self.total.backward()

meter = Meter(nn.Linear(3, 1))
for it in range(3):
    meter.update(torch.randn(4, 3))
""",
        ("self.total",),
    ),
]

PRECOMPUTED = [
    Program(
        "before_the_loop",
        "GG205",
        """
raw = nn.Parameter(torch.randn(4))
head = nn.Linear(4, 1)
opt = torch.optim.SGD([raw, *head.parameters()], lr=0.1)
scale = F.softplus(raw)  # <<
for it in range(3):
    loss = head(torch.randn(5, 4) * scale).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("scale", "raw"),
    ),
    Program(
        "by_a_helper_before_the_loop",
        "GG205",
        """
def normalized(weight):
    return weight / weight.norm(dim=1, keepdim=True)

def train(table, steps):
    opt = torch.optim.Adam([table], lr=0.1)
    directions = normalized(table)  # <<
    for it in range(steps):
        x = torch.randn(6, 4)
        loss = (x @ directions.t()).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

train(nn.Parameter(torch.randn(3, 4)), 4)
""",
        ("directions",),
    ),
    Program(
        "in_the_constructor",
        "GG205",
        """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(3))
        self.lin = nn.Linear(3, 3)
        self.gain = F.softplus(self.raw)  # <<

    def forward(self, x):
        return self.lin(x) * self.gain

model = Scaled()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for it in range(3):
    loss = model(torch.randn(2, 3)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("self.gain", "Scaled"),
    ),
    Program(
        "cached_property",
        "GG205",
        """
from functools import cached_property

class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(5))

    @cached_property
    def kernel(self):
        return self.logits.softmax(0)  # <<

    def forward(self, x):
        return x @ self.kernel

model = Filter()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for it in range(3):
    loss = model(torch.randn(4, 5)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("kernel", "Filter"),
    ),
    Program(
        "memoized_function",
        "GG205",
        """
from functools import lru_cache
freq = nn.Parameter(torch.rand(4))
opt = torch.optim.SGD([freq], lr=0.1)

@lru_cache(maxsize=8)  # <<
def table(length):
    return torch.outer(torch.arange(length).float(), freq).cos()  # <<

for it in range(3):
    loss = (torch.randn(6, 4) * table(6)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("table",),
    ),
    Program(
        "cache_in_a_dict",
        "GG205",
        """
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(2))
        self.cache = {}

    def bias(self, n):
        if n not in self.cache:
            self.cache[n] = (torch.arange(n).float()[:, None] * self.slope).exp()  # <<
        return self.cache[n]

    def forward(self, x):
        return x + self.bias(x.shape[0])

model = Positions()
opt = torch.optim.SGD(model.parameters(), lr=0.001)
for it in range(3):
    loss = model(torch.randn(3, 2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("self.cache", "Positions"),
    ),
    Program(
        "dataset_of_features",
        "GG205",
        """
from torch.utils.data import DataLoader, TensorDataset

backbone = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
head = nn.Linear(5, 2)

def build(n):
    x, y = torch.randn(n, 6), torch.randint(0, 2, (n,))
    features = backbone(x)  # <<
    return TensorDataset(features, y)  # <<

data = build(12)  # <<
opt = torch.optim.SGD(head.parameters(), lr=0.1)
for features, y in DataLoader(data, batch_size=4):
    loss = F.cross_entropy(head(features), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "distribution_before_the_loop",
        "GG205",
        """
from torch.distributions import Normal

def fit():
    mu, rho = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    opt = torch.optim.Adam([mu, rho], lr=0.1)
    q = Normal(mu, F.softplus(rho))  # <<
    for it in range(3):
        z = q.rsample((8,))
        loss = (z - 1).pow(2).mean() + z.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
fit()
""",
        ("`q`",),
    ),
    Program(
        "rollout_reused_over_epochs",
        "GG205",
        """
policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(policy.parameters())
for iteration in range(2):
    states, actions, returns = torch.randn(16, 4), torch.randint(0, 2, (16,)), torch.randn(16)
    old = F.log_softmax(policy(states), -1).gather(1, actions[:, None]).squeeze(1)  # <<
    for epoch in range(3):
        new = F.log_softmax(policy(states), -1).gather(1, actions[:, None]).squeeze(1)
        loss = -((new - old).exp() * returns).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        ("old",),
    ),
    Program(
        "closure_over_features",
        "GG205",
        """
net, head = nn.Linear(3, 4), nn.Linear(4, 1)
opt = torch.optim.LBFGS([*net.parameters(), *head.parameters()], max_iter=4)
x, y = torch.randn(10, 3), torch.randn(10, 1)

def run():
    hidden = torch.tanh(net(x))  # <<

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(head(hidden), y)
        loss.backward()
        return loss

    opt.step(closure)

run()
""",
        ("hidden", "closure"),
    ),
]

SHARED = [
    Program(
        "two_heads_two_backwards",
        "GG202",
        """
trunk, a, b = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 1), nn.Linear(6, 3)
opt = torch.optim.Adam([*trunk.parameters(), *a.parameters(), *b.parameters()])
for it in range(3):
    x, y, c = torch.randn(5, 4), torch.randn(5, 1), torch.randint(0, 3, (5,))
    features = trunk(x)
    loss_a = F.mse_loss(a(features), y)
    loss_b = F.cross_entropy(b(features), c)
    opt.zero_grad()
    loss_a.backward()  # <<
    loss_b.backward()
    opt.step()
""",
        ("features", "loss_a", "loss_b"),
    ),
    Program(
        "losses_in_a_loop",
        "GG202",
        """
trunk = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid())
heads = nn.ModuleList([nn.Linear(6, 1) for _ in range(3)])
opt = torch.optim.Adam([*trunk.parameters(), *heads.parameters()])
for it in range(2):
    z = trunk(torch.randn(5, 4))
    losses = [head(z).pow(2).mean() for head in heads]
    opt.zero_grad()
    for loss in losses:
        loss.backward()  # <<
    opt.step()
""",
        ("`z`",),
    ),
    Program(
        "gan_in_a_class",
        "GG202",
        """
class Pix:
    def __init__(self):
        self.g = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.d = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        self.opt_g = torch.optim.Adam(self.g.parameters())
        self.opt_d = torch.optim.Adam(self.d.parameters())

    def forward(self, x):
        self.fake = self.g(x)

    def backward_d(self, real):
        pred_fake = self.d(self.fake)  # <<
        pred_real = self.d(real)
        self.loss_d = pred_fake.mean() - pred_real.mean()
        self.loss_d.backward()

    def backward_g(self):
        self.loss_g = -self.d(self.fake).mean()
        self.loss_g.backward()

    def optimize(self, x, real):
        self.forward(x)
        self.opt_d.zero_grad()
        self.backward_d(real)
        self.opt_d.step()
        self.opt_g.zero_grad()
        self.backward_g()
        self.opt_g.step()

model = Pix()
for it in range(3):
    model.optimize(torch.randn(4, 3), torch.randn(4, 4))
""",
        ("self.fake",),
    ),
    Program(
        "gan_generator_first_steps_later",
        "GG202",
        """
g, d = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid()), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
bce = nn.BCEWithLogitsLoss()
for it in range(2):
    real, noise = torch.randn(6, 4), torch.randn(6, 3)
    fake = g(noise)
    d_loss = bce(d(real), torch.ones(6, 1)) + bce(d(fake), torch.zeros(6, 1))  # <<
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = bce(d(fake), torch.ones(6, 1))
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
""",
        ("fake", "detach"),
    ),
    Program(
        "gradient_penalty_without_create_graph",
        "GG202",
        """
critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
opt = torch.optim.Adam(critic.parameters())
for it in range(2):
    x = torch.randn(5, 3, requires_grad=True)
    score = critic(x)
    grad = torch.autograd.grad(score.sum(), x)[0]  # <<
    loss = score.mean() + (grad.norm(dim=1) - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("score", "create_graph"),
    ),
    Program(
        "gradient_norm_for_the_log",
        "GG202",
        """
trunk, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
opt = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
for it in range(2):
    z = trunk(torch.randn(5, 3))
    data_loss, penalty = head(z).pow(2).mean(), z.pow(2).mean()
    norm = torch.autograd.grad(data_loss, trunk[0].weight)[0].norm().item()  # <<
    loss = data_loss + 0.1 * penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ("retain_graph",),
    ),
    Program(
        "advantage_not_detached",
        "GG202",
        """
actor, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt_a, opt_c = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
for it in range(2):
    s, r, a = torch.randn(6, 3), torch.randn(6), torch.randint(0, 2, (6,))
    values = critic(s).squeeze(1)
    advantage = r - values  # <<
    critic_loss = advantage.pow(2).mean()
    opt_c.zero_grad()
    critic_loss.backward()
    opt_c.step()
    logp = F.log_softmax(actor(s), 1).gather(1, a[:, None]).squeeze(1)
    actor_loss = -(logp * advantage).mean()  # <<
    opt_a.zero_grad()
    actor_loss.backward()
    opt_a.step()
""",
        ("advantage",),
    ),
    Program(
        "function_with_an_inner_backward",
        "GG202",
        """
class Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin() * ctx.x
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        ctx.y.backward(g)  # <<
        return ctx.x.grad

w = nn.Parameter(torch.randn(4))
y = Solve.apply(w)
one, two = y.sum(), y.pow(2).sum()
one.backward(retain_graph=True)
two.backward()
""",
        ("Solve",),
    ),
    Program(
        "saved_tensors_in_a_custom_backward",
        "GG202",
        """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return 2 * x * g

w = nn.Parameter(torch.randn(4))
opt = torch.optim.SGD([w], lr=0.1)
y = Square.apply(w)
first = (y + 1).sum()
second = (y + 2).sum()
first.backward()  # <<
second.backward()
""",
        ("`y`",),
    ),
    Program(
        "two_losses_through_one_helper",
        "GG202",
        """
trunk, a, b = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1), nn.Linear(4, 1)
opt = torch.optim.SGD([*trunk.parameters(), *a.parameters(), *b.parameters()], lr=0.1)

def contribute(loss, weight):
    (weight * loss).backward()

for it in range(2):
    features = trunk(torch.randn(5, 3))
    opt.zero_grad()
    contribute(a(features).pow(2).mean(), 1.0)  # <<
    contribute(b(features).pow(2).mean(), 0.5)
    opt.step()
""",
        ("features", "contribute", "at line"),
    ),
    Program(
        "temperature_of_an_actor",
        "GG202",
        """
class Agent:
    def __init__(self):
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(3, 2)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.optimizers = {
            "actor": torch.optim.SGD(self.actor.parameters(), lr=0.1),
            "critic": torch.optim.SGD(self.critic.parameters(), lr=0.1),
            "alpha": torch.optim.SGD([self.log_alpha], lr=0.1),
        }

    def critic_loss(self, x, alpha):
        with torch.no_grad():
            target = x.sum(1, keepdim=True) - alpha * self.actor(x).log_softmax(1)
        return F.mse_loss(self.critic(x), target)

    def actor_loss(self, x, alpha):
        logp = self.actor(x).log_softmax(1)
        return (logp.exp() * (alpha * logp - self.critic(x).detach())).mean(), logp.detach()

    def apply(self, name, loss):
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()

    def update(self, x):
        alpha = self.log_alpha.exp()
        self.apply("critic", self.critic_loss(x, alpha))
        actor_loss, logp = self.actor_loss(x, alpha)  # <<
        self.apply("actor", actor_loss)
        self.apply("alpha", (alpha * (-logp - 0.5)).mean())

agent = Agent()
for it in range(3):
    agent.update(torch.randn(5, 3))
""",
        ("alpha.detach()",),
    ),
    Program(
        "temperature_of_an_actor_whose_loss_is_gone",
        "GG202",
        """
class Agent:
    def __init__(self):
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(3, 2)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_opt = torch.optim.SGD(self.actor.parameters(), lr=0.1)
        self.critic_opt = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.alpha_opt = torch.optim.SGD([self.log_alpha], lr=0.1)

    @torch.no_grad()
    def target(self, x, alpha):
        return x.sum(1, keepdim=True) - alpha * self.actor(x).log_softmax(1)

    def apply(self, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def actor_step(self, x, alpha):
        logp = self.actor(x).log_softmax(1)
        self.apply(self.actor_opt, (logp.exp() * (alpha * logp - self.critic(x).detach())).mean())  # <<
        return logp.detach()

    def update(self, x):
        alpha = self.log_alpha.exp()
        self.apply(self.critic_opt, F.mse_loss(self.critic(x), self.target(x, alpha)))
        logp = self.actor_step(x, alpha)
        self.apply(self.alpha_opt, (alpha * (-logp - 0.5)).mean())

agent = Agent()
for it in range(3):
    agent.update(torch.randn(5, 3))
""",
        ("alpha.detach()",),
    ),
    Program(
        "real_batch_before_the_generated_one",
        "GG202",
        """
g, d = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt_g, opt_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)

def adversarial(x, wanted):
    F.binary_cross_entropy_with_logits(d(x), torch.full((5, 1), wanted)).backward()

for it in range(2):
    fake = g(torch.randn(5, 2))
    opt_d.zero_grad()
    adversarial(torch.randn(5, 3), 1.0)
    adversarial(fake, 0.0)  # <<
    opt_d.step()
    opt_g.zero_grad()
    adversarial(fake, 1.0)
    opt_g.step()
""",
        ("fake.detach()",),
    ),
]

SAME_ROOT = [
    Program(
        "loss_before_the_loop",
        "GG201",
        """
def fit(model, x, y):
    opt = torch.optim.Adam(model.parameters())
    output = model(x)  # <<
    loss = F.mse_loss(output, y)  # <<
    for epoch in range(4):
        opt.zero_grad()
        loss.backward()
        opt.step()
fit(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(5, 2), torch.randn(5, 1))
""",
        ("loss", "output"),
    ),
    Program(
        "loss_outside_the_closure",
        "GG201",
        """
net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
opt = torch.optim.LBFGS(net.parameters(), max_iter=4)
x, y = torch.randn(5, 2), torch.randn(5, 1)
loss = F.mse_loss(net(x), y)  # <<

def closure():
    opt.zero_grad()
    loss.backward()
    return loss

opt.step(closure)
""",
        ("loss", "closure"),
    ),
    Program(
        "grad_then_backward",
        "GG201",
        """
net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
loss = net(torch.randn(4, 2)).pow(2).mean()
grads = torch.autograd.grad(loss, list(net.parameters()))  # <<
loss.backward()
""",
        ("loss", "retain_graph"),
    ),
    Program(
        "helper_called_twice",
        "GG201",
        """
net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def update(loss):
    opt.zero_grad()
    loss.backward()
    opt.step()

loss = net(torch.randn(4, 2)).pow(2).mean()
update(loss)
update(loss)  # <<
""",
        ("loss",),
    ),
    Program(
        "loss_in_an_attribute",
        "GG201",
        """
class Fitter:
    def __init__(self, net, x):
        self.net = net
        self.loss = net(x).tanh().sum()  # <<

    def step(self):
        self.loss.backward()

fitter = Fitter(nn.Linear(2, 1), torch.randn(3, 2))
for i in range(3):
    fitter.step()
""",
        ("self.loss",),
    ),
]

ALL = [*CARRIED, *ACCUMULATED, *PRECOMPUTED, *SHARED, *SAME_ROOT]
