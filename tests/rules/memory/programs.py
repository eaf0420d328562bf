"""Programs that run out of memory, by what holds it: several spellings of each, with sound twins for the same limit."""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """A program of which two spellings of one line differ: the faulty and the sound.

    Attributes:
        source: with `{it}` where the two differ, or with `{before}` and such by name.
        mib: the limit, beyond what the process has.
        faulty, sound: what is put there.
        culprit: the text of the line that is told.
    """

    source: str
    mib: int
    faulty: dict[str, str]
    sound: dict[str, str]
    culprit: str

    def broken(self) -> str:
        return self.source.format(**self.faulty)

    def repaired(self) -> str:
        return self.source.format(**self.sound)


_NET = """
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
"""

KEPT = {
    "list": Program(
        _NET
        + """
history = []
for step in range(24):
    x, y = torch.randn(2048, 64), torch.randn(2048)
    loss = F.mse_loss(model(x).squeeze(-1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    error = F.l1_loss(model(x).squeeze(-1), y)
    history.append({value})
""",
        60,
        {"value": "error"},
        {"value": "error.item()"},
        "history.append(error)",
    ),
    "attribute": Program(
        _NET
        + """
class Trainer:
    def __init__(self):
        self.average = torch.zeros(())

    def track(self, x, y):
        error = F.l1_loss(model(x).squeeze(-1), y)
        self.average = 0.9 * self.average + 0.1 * {value}

    def step(self):
        x, y = torch.randn(2048, 64), torch.randn(2048)
        opt.zero_grad()
        F.mse_loss(model(x).squeeze(-1), y).backward()
        opt.step()
        self.track(x, y)

trainer = Trainer()
for _ in range(24):
    trainer.step()
""",
        60,
        {"value": "error"},
        {"value": "error.detach()"},
        "self.average = 0.9 * self.average + 0.1 * error",
    ),
    "dict": Program(
        _NET
        + """
from collections import defaultdict
logs = defaultdict(list)

def log(name, value):
    logs[name].append(value)

def train():
    for step in range(24):
        x, y = torch.randn(2048, 64), torch.randn(2048)
        out = model(x).squeeze(-1)
        opt.zero_grad()
        F.mse_loss(out, y).backward({retain})
        opt.step()
        log("mae", (out - y).abs().mean())

train()
""",
        60,
        {"retain": "retain_graph=True"},
        {"retain": ""},
        "logs[name].append(value)",
    ),
    "total": Program(
        _NET
        + """
def main():
    total = 0.0
    for step in range(24):
        x, y = torch.randn(2048, 64), torch.randn(2048)
        loss = F.mse_loss(model(x).squeeze(-1), y)
        opt.zero_grad()
        loss.backward(retain_graph=True)
        opt.step()
        total += {value}
    return total

main()
""",
        60,
        {"value": "loss"},
        {"value": "loss.item()"},
        "total += loss",
    ),
}

EVALUATION = {
    "sum": Program(
        _NET
        + """
x, y = torch.randn(256, 64), torch.randn(256)
for _ in range(3):
    opt.zero_grad()
    F.mse_loss(model(x).squeeze(-1), y).backward()
    opt.step()

def evaluate(model, batches):
    model.eval()
    total = 0.0
    for x, y in batches:
        {mode}
            total = total + F.mse_loss(model(x).squeeze(-1), y)
    return total / len(batches)

evaluate(model, [(torch.randn(2048, 64), torch.randn(2048)) for _ in range(24)])
""",
        60,
        {"mode": "if True:"},
        {"mode": "with torch.no_grad():"},
        "for x, y in batches",
    ),
    "generator": Program(
        _NET
        + """
class Trainer:
    def __init__(self, model):
        self.model = model

    def fit(self):
        for _ in range(3):
            opt.zero_grad()
            F.mse_loss(self.model(torch.randn(32, 64)).squeeze(-1), torch.randn(32)).backward()
            opt.step()

    {mode}
    def validate(self, batches):
        self.model.eval()
        losses = []
        for x, y in batches:
            losses.append(self.loss(x, y))
        return torch.stack(losses).mean()

    def loss(self, x, y):
        return F.mse_loss(self.model(x).squeeze(-1), y)

trainer = Trainer(model)
trainer.fit()
trainer.validate([(torch.randn(2048, 64), torch.randn(2048)) for _ in range(24)])
""",
        60,
        {"mode": ""},
        {"mode": "@torch.no_grad()"},
        "for x, y in batches",
    ),
    "one forward": Program(
        """
model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.Tanh())])
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(64, 256)).pow(2).mean().backward()
    opt.step()

def score(batch):
    model.eval()
    {mode}
        return model(batch).pow(2).mean(dim=1)

print(score(torch.randn(16384, 256)).shape)
""",
        130,
        {"mode": "if True:"},
        {"mode": "with torch.no_grad():"},
        "model(batch)",
    ),
}

OUTPUTS = {
    "list": Program(
        _NET
        + """
def predict(batches):
    outputs = []
    for x in batches:
        outputs.append(model(x){let})
    return torch.cat(outputs)

predict([torch.randn(2048, 64) for _ in range(24)])
""",
        60,
        {"let": ""},
        {"let": ".detach()"},
        "outputs.append(model(x))",
    ),
    "comprehension": Program(
        _NET
        + """
batches = [torch.randn(2048, 64) for _ in range(24)]
outputs = [model(x){let} for x in batches]
""",
        60,
        {"let": ""},
        {"let": ".detach()"},
        "[model(x) for x in batches]",
    ),
    "dict": Program(
        _NET
        + """
class Collector:
    def __init__(self):
        self.scores = {{}}

    def add(self, i, out):
        self.scores[i] = out{let}

def run(collector, n):
    for i in range(n):
        x = torch.randn(2048, 64)
        collector.add(i, model(x))

collector = Collector()
run(collector, 24)
print(torch.stack(list(collector.scores.values())).mean())
""",
        60,
        {"let": ""},
        {"let": ".detach()"},
        "self.scores[i] = out",
    ),
}

HUGE = {
    "difference": Program(
        """
model = nn.Linear(16, 1)
x, y = torch.randn(20000, 16), torch.randn(20000)
loss = ({prediction} - y).pow(2).mean()
loss.backward()
""",
        500,
        {"prediction": "model(x)"},
        {"prediction": "model(x).squeeze(-1)"},
        "model(x) - y",
    ),
    "method": Program(
        """
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, states, returns):
        values = self.net(states){flat}
        advantage = returns - values
        return advantage.pow(2).mean()

critic = Critic()
def train():
    loss = critic.loss(torch.randn(20000, 16), torch.randn(20000))
    loss.backward()
train()
""",
        500,
        {"flat": ""},
        {"flat": ".squeeze(1)"},
        "returns - values",
    ),
    "loss function": Program(
        """
import warnings
warnings.simplefilter("ignore")
model = nn.Linear(16, 1)
def criterion(prediction, target):
    return F.mse_loss(prediction, target)
for _ in range(3):
    x, y = torch.randn(20000, 16), torch.randn(20000)
    criterion(model(x){flat}, y).backward()
""",
        500,
        {"flat": ""},
        {"flat": "[:, 0]"},
        "F.mse_loss(prediction, target)",
    ),
}

OPTIMIZER = {
    "Adam": Program(
        """
model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
opt = torch.optim.{kind}(model.parameters(), lr=1e-3)
x = torch.randn(8, 2048)
for _ in range(3):
    opt.zero_grad()
    model(x).pow(2).mean().backward()
    opt.step()
""",
        90,
        {"kind": "Adam"},
        {"kind": "SGD"},
        "opt.step()",
    ),
    "AdamW": Program(
        """
class Loop:
    def __init__(self):
        self.net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), {how})

    def update(self, x):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()

loop = Loop()
for _ in range(3):
    loop.update(torch.randn(8, 1024))
""",
        155,
        {"how": "foreach=True"},
        {"how": "foreach=False"},
        "self.optimizer.step()",
    ),
    "momentum": Program(
        """
model = nn.Embedding(20000, 512)
def make(parameters):
    return torch.optim.SGD(parameters, lr=0.1{momentum})
optimizer = make(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = model(torch.arange(16)).sum()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
""",
        100,
        {"momentum": ", momentum=0.9"},
        {"momentum": ""},
        "optimizer.step(closure)",
    ),
}

ATTENTION = {
    "matmul": Program(
        """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (each.view(b, n, 8, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        {attend}
        return out.transpose(1, 2).reshape(b, n, d)

model = Attention()
model(torch.randn(1, 2048, 64)).pow(2).mean().backward()
""",
        80,
        {"attend": "out = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, dim=-1) @ v"},
        {"attend": "out = F.scaled_dot_product_attention(q, k, v)"},
        "q @ k.transpose(-2, -1)",
    ),
    "einsum": Program(
        """
def attention(query, key, value):
    {attend}

proj = nn.Linear(64, 64)
tokens = torch.randn(2, 2048, 64)
q = proj(tokens).view(2, 2048, 4, 16).transpose(1, 2)
for _ in range(2):
    attention(q, q, q).sum().backward(retain_graph=True)
""",
        80,
        {"attend": 'return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(-1), value)'},
        {"attend": "return F.scaled_dot_product_attention(query, key, value)"},
        'torch.einsum("bhqd,bhkd->bhqk", query, key)',
    ),
    "module": Program(
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 8, batch_first=True)

    def forward(self, x):
        mixed, _ = self.attention(x, x, x{weights})
        return x + mixed

Block()(torch.randn(1, 2048, 64)).mean().backward()
""",
        80,
        {"weights": ""},
        {"weights": ", need_weights=False"},
        "self.attention(x, x, x)",
    ),
}

ACTIVATIONS = {
    "sequential": Program(
        """
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    x, y = torch.randn({batch}, 256), torch.randint(10, ({batch},))
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
        60,
        {"batch": "8192"},
        {"batch": "2048"},
        "model(x)",
    ),
    "loop": Program(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(128, 128)

    def forward(self, x):
        for _ in range(20):
            x = torch.tanh(self.cell(x))
        return x

net = Net()
opt = torch.optim.Adam(net.parameters())
def step(n):
    opt.zero_grad()
    loss = net(torch.randn(n, 128)).mean()
    loss.backward()
    opt.step()
for n in (512, 1024, {batch}):
    step(n)
""",
        100,
        {"batch": "16384"},
        {"batch": "2048"},
        "torch.tanh(self.cell(x))",
    ),
}

_DEEP = """
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
NEEDED = {  # graphs that a backward call needs, in programs that look as if they kept or evaluated something
    "losses summed over micro-batches": _DEEP
    + """
total = 0.0
for _ in range(40):
    total = total + model(torch.randn(1024, 256)).pow(2).mean()
total.backward()
opt.step()
""",
    "losses in a list": _DEEP
    + """
def losses(batches):
    found = []
    for x in batches:
        found.append(model(x).pow(2).mean())
    return found

loss = torch.stack(losses(torch.randn(1024, 256) for _ in range(40))).sum()
loss.backward()
""",
    "an attack on a model in eval mode": _DEEP
    + """
def attack(x):
    model.eval()
    for _ in range(4):
        x = x.detach().requires_grad_()
        score = model(x).sum()
        (grad,) = torch.autograd.grad(score, x)
        x = x + 0.1 * grad.sign()
    return x

attack(torch.randn(16384, 256))
""",
    "a closure": _DEEP
    + """
model.eval()
def closure():
    opt.zero_grad()
    loss = model(torch.randn(16384, 256)).square().mean()
    loss.backward()
    return loss
for _ in range(3):
    opt.step(closure)
""",
    "a step that returns its loss": _DEEP
    + """
class Trainer:
    def training_step(self, x):
        return {"loss": model(x).square().mean()}

    def fit(self):
        for _ in range(3):
            out = self.training_step(torch.randn(16384, 256))
            opt.zero_grad()
            out["loss"].backward()
            opt.step()

model.eval()
Trainer().fit()
""",
    "states of a recurrent net": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(32, 256)
        self.head = nn.Linear(256, 1)

    def forward(self, x):
        h, outputs = torch.zeros(x.shape[1], 256), []
        for each in x:
            h = self.cell(each, h)
            outputs.append(h)
        return self.head(torch.stack(outputs))

net = Net()
for n in (8, 400):
    net(torch.randn(n, 512, 32)).mean().backward()
""",
}
