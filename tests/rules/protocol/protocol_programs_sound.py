"""Programs that look odd and are sound: none of them may be warned of, at any level."""

from __future__ import annotations

_TOP = """
import copy
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def mlp(i=4, o=1, h=8):
    return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o))
"""

SOUND: dict[str, str] = {
    "accumulation_scaled": """
net, every = mlp(), 4
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for i in range(40):
    (F.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 1)) / every).backward()
    if (i + 1) % every == 0:
        opt.step()
        opt.zero_grad()
""",
    "accumulation_scaled_by_the_rate": """
net, every = mlp(), 4
opt = torch.optim.SGD(net.parameters(), lr=0.04 / every)
for i in range(40):
    F.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 1)).backward()
    if (i + 1) % every == 0:
        opt.step()
        opt.zero_grad()
""",
    "several_losses_in_a_loop": """
net = mlp(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(12):
    opt.zero_grad()
    out = net(torch.randn(8, 4))
    losses = [out[:, k].pow(2).mean() for k in range(3)]
    for loss in losses:
        loss.backward(retain_graph=True)
    opt.step()
""",
    "episode_of_single_losses": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for episode in range(8):
    for _ in range(5):
        net(torch.randn(1, 4)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
""",
    "gan": """
G, D = mlp(3, 2), mlp(2, 1)
og, od = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
for _ in range(15):
    for _ in range(3):
        od.zero_grad()
        D(torch.randn(8, 2)).mean().backward()
        (-D(G(torch.randn(8, 3)).detach()).mean()).backward()
        od.step()
    og.zero_grad()
    (-D(G(torch.randn(8, 3))).mean()).backward()
    og.step()
""",
    "gan_frozen_critic_with_norm": """
G = mlp(3, 2)
D = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
og, od = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
for _ in range(40):
    D.requires_grad_(True)
    od.zero_grad()
    (D(torch.randn(8, 2)).mean() - D(G(torch.randn(8, 3)).detach()).mean()).backward()
    od.step()
    D.requires_grad_(False)
    og.zero_grad()
    (-D(G(torch.randn(8, 3))).mean()).backward()
    og.step()
""",
    "sharpness_aware": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(15):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    F.mse_loss(net(x), y).backward()
    with torch.no_grad():
        eps = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in net.parameters()]
        for p, e in zip(net.parameters(), eps):
            p.add_(e)
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    with torch.no_grad():
        for p, e in zip(net.parameters(), eps):
            p.sub_(e)
    opt.step()
    opt.zero_grad()
""",
    "lbfgs": """
net = mlp()
x, y = torch.randn(32, 4), torch.randn(32, 1)
opt = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
def closure():
    opt.zero_grad()
    loss = F.mse_loss(net(x), y)
    loss.backward()
    return loss
for _ in range(8):
    opt.step(closure)
""",
    "zeroed_by_hand": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for i in range(12):
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    for p in net.parameters():
        if i % 3 == 0:
            p.grad = None
        elif i % 3 == 1:
            p.grad.zero_()
        else:
            p.grad.data.zero_()
""",
    "zeroed_through_data": """
net = mlp()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(20):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.data.fill_(0)
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "set_to_zero": """
net = nn.ModuleDict({"a": mlp(), "b": mlp()})
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for i in range(20):
    opt.zero_grad(set_to_none=False)
    net["a" if i % 3 else "b"](torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "rare_head": """
body, often, rare = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
opt = torch.optim.Adam([*body.parameters(), *often.parameters(), *rare.parameters()], lr=1e-3)
for i in range(45):
    head = rare if i % 15 == 14 else often
    opt.zero_grad()
    head(body(torch.randn(8, 4))).pow(2).mean().backward()
    opt.step()
""",
    "frozen_backbone": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.backbone(x))
net = Net()
net.backbone.requires_grad_(False)
opt = torch.optim.SGD(filter(lambda p: p.requires_grad, net.parameters()), lr=0.1)
for _ in range(30):
    net.train()
    net.backbone.eval()
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 2, (8,))).backward()
    opt.step()
""",
    "frozen_parameters_in_the_optimizer": """
net = mlp()
net[0].requires_grad_(False)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "two_phases": """
net = nn.Sequential(mlp(4, 8), nn.Tanh(), nn.Linear(8, 1))
def phase(parameters, steps):
    opt = torch.optim.Adam(parameters, lr=1e-3)
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
net[0].requires_grad_(False)
phase(net[2].parameters(), 30)
net[0].requires_grad_(True)
phase(net.parameters(), 30)
""",
    "two_phases_without_freezing": """
net = nn.Sequential(mlp(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net[2].parameters(), lr=1e-3)
for step in range(60):
    if step == 30:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
""",
    "moving_average_teacher": """
student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(student.parameters(), lr=0.05)
for _ in range(30):
    x = torch.randn(16, 4)
    with torch.no_grad():
        target = teacher(x + 0.1 * torch.randn_like(x))
    opt.zero_grad()
    F.mse_loss(student(x), target).backward()
    opt.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.mul_(0.99).add_(s, alpha=0.01)
""",
    "teacher_with_grad_mode_on": """
student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
opt = torch.optim.SGD(student.parameters(), lr=0.05)
for _ in range(30):
    x = torch.randn(16, 4)
    opt.zero_grad()
    F.mse_loss(student(x), teacher(x)).backward()
    opt.step()
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.data.mul_(0.99).add_(s.data, alpha=0.01)
""",
    "adversarial_examples": """
net = mlp(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(15):
    x, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 3, (8,))
    F.cross_entropy(net(x), y).backward()
    hostile = (x + 0.1 * x.grad.sign()).detach()
    opt.zero_grad()
    F.cross_entropy(net(hostile), y).backward()
    opt.step()
    opt.zero_grad()
""",
    "fisher_information": """
net = mlp(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(10):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
    opt.step()
fisher = [torch.zeros_like(p) for p in net.parameters()]
for _ in range(20):
    net.zero_grad()
    F.cross_entropy(net(torch.randn(1, 4)), torch.randint(0, 3, (1,))).backward()
    for f, p in zip(fisher, net.parameters()):
        f += p.grad.detach() ** 2
net.zero_grad()
""",
    "gradient_surgery": """
net = mlp(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(12):
    out = net(torch.randn(8, 4))
    grads = []
    for k in range(2):
        opt.zero_grad()
        out[:, k].pow(2).mean().backward(retain_graph=True)
        grads.append([p.grad.clone() for p in net.parameters()])
    for p, a, b in zip(net.parameters(), *grads):
        p.grad = a + b
    opt.step()
""",
    "manual_updates": """
net = mlp()
for _ in range(30):
    net.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    for p in net.parameters():
        p.data -= 0.01 * p.grad
""",
    "rate_warms_up_from_zero": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0 if step < 40 else min(1.0, (step - 40) / 20))
for _ in range(80):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    schedule.step()
""",
    "cosine_to_the_end": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=100)
for _ in range(100):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    schedule.step()
""",
    "style_transfer": """
features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
image = torch.rand(1, 1, 8, 8, requires_grad=True)
target = features(torch.rand(1, 1, 8, 8)).detach()
opt = torch.optim.Adam([image], lr=0.01)
for _ in range(30):
    opt.zero_grad()
    F.mse_loss(features(image), target).backward()
    opt.step()
""",
    "latent_search": """
G = mlp(3, 5)
z = torch.randn(1, 3, requires_grad=True)
opt = torch.optim.Adam([z], lr=0.01)
for _ in range(30):
    opt.zero_grad()
    G(z).pow(2).mean().backward()
    opt.step()
""",
    "pretrained_part_left_out": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = mlp(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.encoder(x))
net = Net()
net.encoder.load_state_dict(mlp(4, 8).state_dict())
opt = torch.optim.Adam(net.head.parameters(), lr=0.01)
for _ in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "abandoned_optimizer": """
net = mlp()
old = torch.optim.SGD(net.parameters(), lr=0.1)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "optimizer_around_an_optimizer": """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        self.base, self.count = base, 0
        super().__init__(base.param_groups, {})
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % 5 == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for s, f in zip(self.slow, fast):
                s.add_(f.detach() - s, alpha=0.5)
                f.data.copy_(s)
net = mlp()
opt = Lookahead(torch.optim.SGD(net.parameters(), lr=0.05))
for _ in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "alternating_optimizers_over_one_net": """
net = mlp()
first, second = torch.optim.SGD(net.parameters(), lr=0.01), torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(40):
    opt = first if i % 2 else second
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "tied_weights": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.project = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.project.weight = self.embed.weight
    def forward(self, ids):
        return self.project(self.embed(ids))
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(12):
    ids = torch.randint(0, 10, (8,))
    opt.zero_grad()
    F.cross_entropy(net(ids), ids).backward()
    opt.step()
""",
    "monte_carlo_dropout": """
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(10):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
x = torch.randn(8, 4)
with torch.no_grad():
    spread = torch.stack([net(x) for _ in range(20)]).std(0)
""",
    "norm_statistics_again": """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(10):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
net.train()
with torch.no_grad():
    for _ in range(8):
        net(torch.randn(8, 4))
""",
    "validating_rightly": """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(4):
    net.train()
    for _ in range(8):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        for _ in range(5):
            net(torch.randn(8, 4))
""",
    "adversaries_made_in_eval_mode": """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(12):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    net.eval()
    delta = torch.zeros_like(x, requires_grad=True)
    grad, = torch.autograd.grad(F.cross_entropy(net(x + delta), y), delta)
    net.train()
    opt.zero_grad()
    F.cross_entropy(net(x + 0.1 * grad.sign()), y).backward()
    opt.step()
""",
    "policy_rollouts": """
policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
for _ in range(10):
    states, actions = [], []
    with torch.no_grad():
        for _ in range(10):
            s = torch.randn(4)
            actions.append(torch.distributions.Categorical(logits=policy(s)).sample())
            states.append(s)
    dist = torch.distributions.Categorical(logits=policy(torch.stack(states)))
    loss = -(dist.log_prob(torch.stack(actions)) * torch.randn(10)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "norm_logged_with_clip": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(12):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    norm = nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
""",
    "clipped_in_time": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for i in range(200):
    net(torch.randn(8, 4)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
""",
    "numbers_kept": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
losses, last = [], None
for i in range(150):
    loss = net(torch.randn(8, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.detach())
    last = loss
""",
    "losses_of_a_window": """
from collections import deque
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
recent = deque(maxlen=10)
for i in range(200):
    loss = net(torch.randn(8, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    recent.append(loss)
""",
    "self_play": """
player = mlp(4, 3)
opponent = copy.deepcopy(player)
opt = torch.optim.Adam(player.parameters(), lr=1e-3)
for i in range(40):
    x = torch.randn(8, 4)
    with torch.no_grad():
        move = opponent(x).argmax(1)
    opt.zero_grad()
    F.cross_entropy(player(x), move).backward()
    opt.step()
    if i % 10 == 9:
        opponent.load_state_dict(player.state_dict())
""",
    "straight_through": """
encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 4)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for _ in range(30):
    x = torch.randn(8, 4)
    h = encoder(x)
    hard = (h > 0).float()
    code = hard + h - h.detach()
    opt.zero_grad()
    F.mse_loss(decoder(code), x).backward()
    opt.step()
""",
    "checkpointed": """
from torch.utils.checkpoint import checkpoint
a, b = nn.Linear(4, 8), nn.Linear(8, 1)
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.05)
for _ in range(30):
    opt.zero_grad()
    b(checkpoint(lambda t: a(t).relu(), torch.randn(8, 4), use_reentrant=False)).pow(2).mean().backward()
    opt.step()
""",
    "freeze_with_nothing_to_freeze": """
class Net(nn.Module):
    def __init__(self, frozen=-1):
        super().__init__()
        self.frozen = frozen
        self.stages = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    def _freeze(self):
        for stage in self.stages[:self.frozen + 1]:
            for p in stage.parameters():
                p.requires_grad = False
    def train(self, mode=True):
        super().train(mode)
        self._freeze()
        return self
    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
    "shared_gradients_of_a_worker": """
shared, local = mlp(), mlp()
opt = torch.optim.Adam(shared.parameters(), lr=1e-3)
for _ in range(20):
    local.load_state_dict(shared.state_dict())
    local.zero_grad()
    opt.zero_grad()
    local(torch.randn(8, 4)).pow(2).mean().backward()
    for s, l in zip(shared.parameters(), local.parameters()):
        s.grad = l.grad
    opt.step()
""",
    "cross_validation": """
for fold in range(4):
    net = mlp()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(20):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
""",
    "encoders_and_heads_step_at_different_rates": """
encoder, head = mlp(4, 8), nn.Linear(8, 1)
oe, oh = torch.optim.SGD(encoder.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.01)
for i in range(60):
    (head(encoder(torch.randn(8, 4))).pow(2).mean() / 2).backward()
    oh.step()
    oh.zero_grad()
    if i % 3 == 2:
        oe.step()
        oe.zero_grad()
""",
    "schedulers_of_two_networks": """
G, D = mlp(3, 2), mlp(2, 1)
og, od = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
sg, sd = torch.optim.lr_scheduler.StepLR(og, 30), torch.optim.lr_scheduler.StepLR(od, 30)
for i in range(40):
    od.zero_grad()
    D(G(torch.randn(8, 3)).detach()).mean().backward()
    od.step()
    if i % 8 == 7:
        og.zero_grad()
        (-D(G(torch.randn(8, 3))).mean()).backward()
        og.step()
    sg.step()
    sd.step()
""",
    "long_run": """
net = mlp()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for i in range(600):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
""",
}


def source_of(name: str) -> str:
    """The whole program."""
    return _TOP + SOUND[name]
