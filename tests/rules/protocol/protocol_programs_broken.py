"""Programs that train wrongly without an error: (rule, source); the culprit's line ends in `# HERE`."""

from __future__ import annotations

_TOP = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""

BROKEN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "never_zeroed_in_a_method": (
        "stale-gradients",
        """
class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3)
    def fit(self, x, y):
        for _ in range(6):
            loss = F.mse_loss(self.net(x), y)
            loss.backward()
            self.opt.step()  # HERE
Trainer().fit(torch.randn(8, 4), torch.randn(8, 1))
""",
        ("self.opt", "zero_grad"),
    ),
    "zeroed_once_an_epoch": (
        "stale-gradients",
        """
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(3):
    optimizer.zero_grad()
    for _ in range(5):
        F.mse_loss(model(torch.randn(8, 3)), torch.randn(8, 1)).backward()
        optimizer.step()  # HERE
""",
        ("optimizer", "zero_grad"),
    ),
    "second_backward_lost": (
        "zeroed-before-step",
        """
trunk, head_a, head_b = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
opt = torch.optim.SGD([*trunk.parameters(), *head_a.parameters(), *head_b.parameters()], lr=0.1)
for _ in range(8):
    h = trunk(torch.randn(16, 4)).relu()
    opt.zero_grad()
    loss_a = head_a(h).pow(2).mean()
    loss_a.backward(retain_graph=True)
    opt.zero_grad()  # HERE
    loss_b = head_b(h).pow(2).mean()
    loss_b.backward()
    opt.step()
""",
        ("loss_a", "head_a"),
    ),
    "zeroed_in_every_micro_batch": (
        "zeroed-before-step",
        """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(40):
    opt.zero_grad()  # HERE
    loss = F.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 1)) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        opt.step()
""",
        ("opt", "loss"),
    ),
    "list_of_layers": (
        "optimizer-missing-parameters",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = [nn.Linear(8, 8) for _ in range(2)]  # HERE
        self.last = nn.Linear(8, 1)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x)
def main():
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(30):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
main()
""",
        ("blocks", "Net"),
    ),
    "head_replaced_after_the_optimizer": (
        "optimizer-orphaned-parameters",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.fc = nn.Linear(8, 10)
    def forward(self, x):
        return self.fc(self.body(x).relu())
def main():
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    model.fc = nn.Linear(8, 3)  # HERE
    for _ in range(30):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
        opt.step()
main()
""",
        ("fc", "opt"),
    ),
    "copy_after_the_optimizer": (
        "optimizer-orphaned-parameters",
        """
import copy
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = copy.deepcopy(model)  # HERE
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
""",
        ("optimizer", "model"),
    ),
    "wrong_layer_used_twice": (
        "parameter-without-grad",
        """
class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, 1)
    def forward(self, x):
        q = self.query(x)
        k = self.query(x)  # HERE
        v = self.value(x)
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
model = Attention(8)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(2, 5, 8)).pow(2).mean().backward()
    optimizer.step()
""",
        ("key", "query"),
    ),
    "encoder_under_no_grad": (
        "parameter-without-grad",
        """
encoder, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
opt = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-3)
def step(x):
    with torch.no_grad():  # HERE
        h = encoder(x)
    loss = head(h).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
for _ in range(40):
    step(torch.randn(8, 4))
""",
        ("encoder",),
    ),
    "stepped_twice": (
        "step-without-backward",
        """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(6):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    opt.step()  # HERE
""",
        ("opt",),
    ),
    "backward_forgotten": (
        "step-without-backward",
        """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(12):
    opt.zero_grad()
    loss = net(torch.randn(8, 4)).pow(2).mean()
    opt.step()  # HERE
""",
        ("opt", "backward"),
    ),
    "wrong_optimizer_stepped": (
        "backward-without-step",
        """
gen, disc = nn.Linear(2, 2), nn.Linear(2, 1)
gen_opt = torch.optim.SGD(gen.parameters(), lr=0.01)
disc_opt = torch.optim.SGD(disc.parameters(), lr=0.01)
for _ in range(20):
    gen_opt.zero_grad()
    (-disc(gen(torch.randn(8, 2))).mean()).backward()
    gen_opt.step()
    disc_opt.zero_grad()
    disc(gen(torch.randn(8, 2)).detach()).mean().backward()
    gen_opt.step()  # HERE
""",
        ("disc_opt", "disc"),
    ),
    "condition_never_true": (
        "backward-without-step",
        """
def train(net, batches, accumulate=16):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(4):
        opt.zero_grad()
        for i in range(batches):
            (net(torch.randn(4, 3)).pow(2).mean() / accumulate).backward()
            if i % accumulate == accumulate - 1:  # HERE
                opt.step()
                opt.zero_grad()
train(nn.Linear(3, 1), 8)
""",
        ("opt", "accumulate"),
    ),
    "losses_kept": (
        "graph-retained",
        """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
history = []
for _ in range(120):
    loss = net(torch.randn(8, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    history.append(loss)  # HERE
""",
        ("history",),
    ),
    "running_total": (
        "graph-retained",
        """
def main():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    total = 0.0
    for _ in range(120):
        loss = net(torch.randn(8, 4)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss  # HERE
main()
""",
        ("total",),
    ),
    "validating_in_train_mode": (
        "train-eval-mode",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)
    def forward(self, x):
        return self.b(self.drop(self.a(x).relu()))
def evaluate(model, batches):
    total = 0.0
    with torch.no_grad():
        for x in batches:
            total += model(x).pow(2).mean().item()  # HERE
    return total
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
    evaluate(model, torch.randn(4, 8, 4).unbind())
""",
        ("model", "dropout"),
    ),
    "left_in_eval_mode": (
        "train-eval-mode",
        """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def validate():
    model.eval()  # HERE
    with torch.no_grad():
        return model(torch.randn(32, 4)).pow(2).mean().item()
model.train()
for _ in range(3):
    for _ in range(8):
        opt.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
    validate()
""",
        ("model", "eval"),
    ),
    "frozen_norm_drifts": (
        "train-eval-mode",
        """
class Probe(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.features = features
        self.classify = nn.Linear(8, 2)
    def forward(self, x):
        return self.classify(self.features(x))
features = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
features.requires_grad_(False)
probe = Probe(features)
opt = torch.optim.SGD(probe.classify.parameters(), lr=0.1)
probe.train()  # HERE
for _ in range(30):
    opt.zero_grad()
    F.cross_entropy(probe(torch.randn(16, 4)), torch.randint(0, 2, (16,))).backward()
    opt.step()
""",
        ("features",),
    ),
    "clipped_too_late": (
        "grad-overwritten",
        """
from torch.nn.utils import clip_grad_value_
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    clip_grad_value_(net.parameters(), 0.5)  # HERE
""",
        ("clip_grad_value_",),
    ),
    "half_precision_weights": (
        "unchanged-parameters",
        """
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
net.bfloat16()  # HERE
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
x, y = torch.randn(64, 16).bfloat16(), torch.randn(64, 1).bfloat16()
for _ in range(60):
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    opt.step()
""",
        ("net", "bfloat16"),
    ),
    "annealed_to_zero": (
        "unchanged-parameters",
        """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.0, total_iters=20)  # HERE
for _ in range(80):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    schedule.step()
""",
        ("lr", "schedule"),
    ),
    "exponential_every_batch": (
        "scheduler-order",
        """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.8)
for epoch in range(3):
    for _ in range(60):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
        scheduler.step()  # HERE
""",
        ("scheduler",),
    ),
    "scheduler_of_the_old_optimizer": (
        "scheduler-order",
        """
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)  # HERE
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(10):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    scheduler.step()
""",
        ("scheduler", "optimizer"),
    ),
    "flag_on_a_module": (
        "unintended-training",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.encoder(x).relu())
def build():
    net = Net()
    net.encoder.requires_grad = False  # HERE
    return net
net = build()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(15):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
""",
        ("encoder", "requires_grad"),
    ),
    "two_optimizers_one_layer": (
        "shared-parameters",
        """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
all_opt = torch.optim.SGD(net.parameters(), lr=0.01)
head_opt = torch.optim.SGD(net[2].parameters(), lr=0.1)  # HERE
for _ in range(12):
    net.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    all_opt.step()
    head_opt.step()
""",
        ("all_opt", "head_opt"),
    ),
    "tied_by_data": (
        "aliased-parameters",
        """
class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.project = nn.Linear(6, 10, bias=False)
        self.project.weight.data = self.embed.weight.data  # HERE
    def forward(self, ids):
        return self.project(self.embed(ids))
net = AutoEncoder()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(6):
    ids = torch.randint(0, 10, (8,))
    opt.zero_grad()
    F.cross_entropy(net(ids), ids).backward()
    opt.step()
""",
        ("embed.weight", "project.weight"),
    ),
    "accumulated_without_scale": (
        "accumulation-scale",
        """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
every = 4
for i in range(32):
    loss = F.mse_loss(net(torch.randn(8, 4)), torch.randn(8, 1))
    loss.backward()  # HERE
    if (i + 1) % every == 0:
        opt.step()
        opt.zero_grad()
""",
        ("loss", "every"),
    ),
}


def source_of(name: str) -> str:
    """The whole program."""
    return _TOP + BROKEN[name][1]
