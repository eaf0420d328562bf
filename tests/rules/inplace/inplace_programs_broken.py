"""Small broken training programs of this family. `#!` marks the line that is the bug; it is taken off before a program runs."""

from __future__ import annotations

from typing import NamedTuple


class Broken(NamedTuple):
    """A program, the rule that must speak and what its message must mention."""

    code: str
    names: tuple[str, ...]
    program: str
    silent: bool = False


HEAD = """
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""

BROKEN: dict[str, Broken] = {}


def _add(slug: str, code: str, names: tuple[str, ...], program: str, silent: bool = False) -> None:
    BROKEN[slug] = Broken(code, names, HEAD + program, silent)


_add(
    "relu_in_sequential",
    "GG101",
    ("nn.ReLU(inplace=True)", "net.2"),
    """
net = nn.Sequential(
    nn.Linear(4, 8),
    nn.Sigmoid(),
    nn.ReLU(inplace=True),  #!
    nn.Linear(8, 1),
)
for _ in range(2):
    loss = net(torch.randn(3, 4)).sum()
    loss.backward()
""",
)

_add(
    "residual_after_gate",
    "GG101",
    ("gate", "x"),
    """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.lin(x))
        gate = torch.sigmoid(self.gate(x))
        x += gate  #!
        return x

model = nn.Sequential(Block(), Block())
model(torch.randn(2, 4)).pow(2).mean().backward()
""",
)

_add(
    "mask_fill_in_helper",
    "GG101",
    ("scores", "hide"),
    """
def hide(scores, mask):
    scores.masked_fill_(mask, 0.0)  #!
    return scores

class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x):
        scores = torch.softmax(self.q(x) @ x.transpose(1, 2), dim=-1)
        mask = torch.ones(3, 3).triu(1).bool()
        return hide(scores, mask) @ x

attn = Attn()
opt = torch.optim.SGD(attn.parameters(), lr=0.1)
for step in range(2):
    loss = attn(torch.randn(2, 3, 4)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "out_argument",
    "GG101",
    ("scale",),
    """
w = torch.randn(4, requires_grad=True)
scale = torch.rand(4)
y = (w * scale).sum()
with torch.no_grad():
    torch.mul(scale, 0.5, out=scale)  #!
y.backward()
""",
)

_add(
    "copy_into_staging",
    "GG101",
    ("staging",),
    """
model = nn.Linear(4, 1)
data = torch.randn(4, 6, 4)
staging = torch.empty(6, 4)
total = 0.0
for i in range(4):
    staging.copy_(data[i])  #!
    total = total + model(staging).pow(2).mean()
total.backward()
""",
)

_add(
    "foreach_on_saved",
    "GG101",
    ("factors",),
    """
w = torch.randn(3, requires_grad=True)
factors = [torch.rand(3), torch.rand(3)]
loss = (w * factors[0]).sum() + (w * factors[1]).sum()
torch._foreach_mul_(factors, 0.9)  #!
loss.backward()
""",
)

_add(
    "running_state_attribute",
    "GG101",
    ("self.state",),
    """
class Memory:
    def __init__(self):
        self.state = torch.zeros(4)

    def read(self, w):
        return (w * self.state).sum()

    def write(self, value):
        self.state[0] = value  #!

w = torch.randn(4, requires_grad=True)
memory = Memory()
loss = memory.read(w)
memory.write(2.0)
loss.backward()
""",
)

_add(
    "clamp_after_exp",
    "GG101",
    ("weights",),
    """
logits = torch.randn(5, requires_grad=True)
weights = logits.exp()
weights.clamp_(max=2.0)  #!
(weights / weights.sum()).log().sum().backward()
""",
)

_add(
    "positions_added_to_tokens",
    "GG101",
    ("tokens",),
    """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.pos = nn.Parameter(torch.zeros(4))

    def forward(self, tokens):
        normed = self.norm(tokens)
        tokens.add_(self.pos)  #!
        return normed * tokens

embed = nn.Linear(3, 4)
encoder = Encoder()
encoder(embed(torch.randn(2, 3))).sum().backward()
""",
)

_add(
    "dropout_functional_inplace",
    "GG101",
    ("F.dropout", "h"),
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        F.dropout(h, 0.5, self.training, inplace=True)  #!
        return self.b(h)

net = Net()
net(torch.randn(3, 4)).mean().backward()
""",
)

_add(
    "detached_in_place",
    "GG101",
    ("h",),
    """
x = torch.randn(3, requires_grad=True)
h = x.exp()
loss = (h * h).sum()
h.detach_()  #!
loss.backward()
""",
)

_add(
    "gan_generator_after_step",
    "GG102",
    ("opt_d", "fake_score", "critic"),
    """
gen, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt_g = torch.optim.Adam(gen.parameters())
opt_d = torch.optim.Adam(critic.parameters())
for step in range(2):
    fake = gen(torch.randn(5, 2))
    fake_score = critic(fake)
    loss_d = fake_score.mean() - critic(torch.randn(5, 3)).mean()
    opt_d.zero_grad()
    loss_d.backward(retain_graph=True)
    opt_d.step()  #!
    loss_g = -fake_score.mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
""",
)

_add(
    "actor_critic_losses_first",
    "GG102",
    ("critic_opt", "q"),
    """
actor, q = nn.Linear(3, 2), nn.Linear(5, 1)
actor_opt = torch.optim.SGD(actor.parameters(), lr=0.1)
critic_opt = torch.optim.SGD(q.parameters(), lr=0.1)

def update(state, target):
    action = actor(state)
    critic_loss = F.mse_loss(q(torch.cat([state, action.detach()], 1)), target)
    actor_loss = -q(torch.cat([state, action], 1)).mean()
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()  #!
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()

for _ in range(2):
    update(torch.randn(4, 3), torch.randn(4, 1))
""",
)

_add(
    "rnn_state_retained",
    "GG203",
    ("opt", "hidden"),
    """
cell = nn.GRUCell(2, 3)
opt = torch.optim.SGD(cell.parameters(), lr=0.1)
hidden = torch.zeros(4, 3)
for step in range(3):
    hidden = cell(torch.randn(4, 2), hidden)  #!
    loss = hidden.pow(2).mean()
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
""",
)

_add(
    "weight_clip_before_backward",
    "GG102",
    ("critic",),
    """
critic = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.RMSprop(critic.parameters())

def clip_weights(module, bound):
    with torch.no_grad():
        for p in module.parameters():
            p.clamp_(-bound, bound)  #!

for step in range(2):
    loss = critic(torch.randn(5, 3)).mean()
    clip_weights(critic, 0.01)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "memory_bank_enqueue",
    "GG108",
    ("model.queue",),
    """
class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(3, 4)
        self.register_buffer("queue", torch.randn(4, 8))
        self.ptr = 0

    @torch.no_grad()
    def enqueue(self, keys):
        n = keys.shape[0]
        self.queue[:, self.ptr:self.ptr + n] = keys.t()  #!

    def forward(self, x):
        q = self.enc(x)
        logits = q @ self.queue
        self.enqueue(q.detach())
        return logits

model = MoCo()
F.cross_entropy(model(torch.randn(2, 3)), torch.tensor([0, 1])).backward()
""",
)

_add(
    "running_mean_by_hand",
    "GG108",
    ("mean",),
    """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        out = self.weight * self.mean + x * self.weight
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)  #!
        return out

norm = Norm()
norm(torch.randn(4, 3)).sum().backward()
""",
)

_add(
    "input_noise_on_leaf",
    "GG103",
    ("x",),
    """
model = nn.Linear(3, 1)
x = torch.randn(4, 3, requires_grad=True)
x += 0.1 * torch.randn(4, 3)  #!
model(x).sum().backward()
""",
)

_add(
    "init_without_no_grad",
    "GG103",
    ("weight",),
    """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.reset()

    def reset(self):
        self.weight.uniform_(-0.1, 0.1)  #!

Layer()
""",
)

_add(
    "zero_padding_row",
    "GG104",
    ("weight",),
    """
emb = nn.Embedding(5, 3)
emb.weight[0] = 0.0  #!
""",
)

_add(
    "flat_view_of_parameter",
    "GG104",
    ("flat", "w"),
    """
w = torch.randn(2, 3, requires_grad=True)
flat = w.view(-1)
flat.mul_(0.5)  #!
""",
)

_add(
    "chunks_scaled",
    "GG105",
    ("scale", "params"),
    """
head = nn.Linear(3, 4)
params = head(torch.randn(2, 3))
shift, scale = params.chunk(2, dim=1)
scale.exp_()  #!
(shift * scale).sum().backward()
""",
)

_add(
    "unbind_then_base",
    "GG105",
    ("states",),
    """
states = nn.Linear(3, 4)(torch.randn(2, 3))
first, second = states.unbind(0)
states.mul_(0.5)  #!
(first + second).sum().backward()
""",
)

_add(
    "split_heads",
    "GG105",
    ("q",),
    """
proj = nn.Linear(4, 12)
q, k, v = proj(torch.randn(2, 4)).split(4, dim=-1)
q *= 0.5  #!
(q * k * v).sum().backward()
""",
)

_add(
    "view_made_under_no_grad",
    "GG106",
    ("head", "features"),
    """
features = nn.Linear(3, 4)(torch.randn(2, 3))
with torch.no_grad():
    head = features[:, :2]
head.mul_(2.0)  #!
features.sum().backward()
""",
)

_add(
    "view_of_a_view_made_under_no_grad",
    "GG106",
    ("part", "whole"),
    """
whole = torch.zeros(4)
with torch.no_grad():
    half = whole[:2]
half.requires_grad_(True)
part = half.view(2, 1)
part.div_(2.0)  #!
""",
)

_add(
    "view_made_in_inference_mode",
    "GG106",
    ("window", "frame"),
    """
frame = nn.Linear(3, 4)(torch.randn(2, 3))
def darken(pixels):
    pixels.mul_(0.5)  #!
with torch.inference_mode():
    window = frame[:, 1:]
darken(window)
""",
)

_add(
    "alias_of_the_branch_that_ran",
    "GG101",
    ("hidden",),
    """
net, spare = nn.Linear(3, 4), torch.zeros(2, 4)
def blank(hidden, real):
    if real:
        rows = hidden[:, 0]
    else:
        rows = spare[:, 0]
    rows.zero_()  #!
    return hidden
hidden = torch.tanh(net(torch.randn(2, 3)))
blank(hidden, True).sum().backward()
""",
)

_add(
    "alias_under_an_if_without_else",
    "GG101",
    ("state",),
    """
cell, unused = nn.Linear(3, 4), torch.ones(2, 4)
state = torch.sigmoid(cell(torch.randn(2, 3)))
flat = state.view(-1)
if unused.sum() < 0:
    flat = unused.view(-1)
flat[0] = 0.0  #!
state.sum().backward()
""",
)

_add(
    "expanded_bias",
    "GG107",
    ("bias",),
    """
bias = torch.zeros(1, 3)
bias = bias.expand(4, 3)
bias += torch.randn(4, 3)  #!
""",
)

_add(
    "shifted_add",
    "GG107",
    ("x",),
    """
x = torch.arange(6.0)
x[1:] += x[:-1]  #!
""",
)

_add(
    "data_clamp",
    "GG109",
    ("probs",),
    """
logits = torch.randn(2, 3, requires_grad=True)
probs = torch.softmax(logits, dim=-1)
probs.data.clamp_(min=0.3)  #!
probs.log().sum().backward()
""",
    silent=True,
)

_add(
    "data_of_parameter",
    "GG109",
    ("net.weight",),
    """
net = nn.Linear(3, 3)
x = torch.randn(2, 3, requires_grad=True)
out = net(x).pow(2).sum()
for p in net.parameters():
    p.data.mul_(0.5)  #!
out.backward()
""",
    silent=True,
)

_add(
    "numpy_sort_of_output",
    "GG101",
    ("probs", "ranked"),
    """
logits = torch.randn(8, requires_grad=True)
probs = torch.sigmoid(logits)
ranked = probs.detach().numpy()
ranked.sort()  #!
probs.sum().backward()
""",
    silent=True,
)

_add(
    "numpy_helper",
    "GG101",
    ("probs", "array"),
    """
def binarize(array):
    array[array > 0.5] = 1.0  #!
    return array.sum()

logits = torch.randn(8, requires_grad=True)
probs = torch.sigmoid(logits)
hits = binarize(probs.detach().numpy())
probs.sum().backward()
""",
    silent=True,
)

_add(
    "numpy_staging_buffer",
    "GG101",
    ("buffer",),
    """
class Loader:
    def __init__(self):
        self.buffer = np.zeros((4, 3), dtype=np.float32)

    def next(self, rng):
        self.buffer[:] = rng.standard_normal((4, 3))  #!
        return torch.from_numpy(self.buffer)

model = nn.Linear(3, 1)
loader, rng = Loader(), np.random.default_rng(0)
total = 0.0
for _ in range(3):
    total = total + model(loader.next(rng)).pow(2).mean()
total.backward()
""",
    silent=True,
)

_add(
    "numpy_copyto",
    "GG101",
    ("frame",),
    """
frame = np.ones(4, dtype=np.float32)
weight = torch.ones(4, requires_grad=True)
loss = (weight * torch.from_numpy(frame)).sum()
np.copyto(frame, np.zeros(4, dtype=np.float32))  #!
loss.backward()
""",
    silent=True,
)

_add(
    "data_replaced",
    "GG109",
    ("scale",),
    """
scale, shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
average = torch.rand(4)
optimizer = torch.optim.SGD([scale, shift], lr=0.1)
x = torch.randn(8, 4)
loss = (torch.tanh(x * scale) * scale + shift).pow(2).mean()
scale.data = average * 0.5  #!
loss.backward()
optimizer.step()
""",
    silent=True,
)
