"""Larger broken programs of this family: whole small training scripts. Any line marked `#!` is a right answer."""

from __future__ import annotations

from inplace_programs_broken import HEAD, Broken

LARGER: dict[str, Broken] = {}


def _add(slug: str, code: str, names: tuple[str, ...], program: str, silent: bool = False) -> None:
    LARGER[slug] = Broken(code, names, HEAD + program, silent)


_add(
    "yolo_head",
    "GG101",
    ("y",),
    """
class Detect(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Conv2d(3, 6, 1)
        self.stride = 8.0
    def forward(self, x):
        y = self.m(x).permute(0, 2, 3, 1).sigmoid()
        y[..., 0:2] = (y[..., 0:2] * 2.0 - 0.5) * self.stride  #!
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2  #!
        return y
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.back = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True))
        self.detect = Detect()
    def forward(self, x):
        return self.detect(self.back(x))
model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    out = model(torch.randn(2, 3, 4, 4))
    loss = out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "resnet_skip",
    "GG101",
    ("relu", "inplace"),
    """
class BasicBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)  #!
    def forward(self, x):
        gate = torch.sigmoid(self.conv1(x))
        out = self.relu(gate)  #!
        out = self.conv2(out)
        return out * gate
net = nn.Sequential(nn.Conv2d(1, 4, 3), BasicBlock(4), BasicBlock(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
opt = torch.optim.Adam(net.parameters())
for _ in range(2):
    loss = F.cross_entropy(net(torch.randn(4, 1, 8, 8)), torch.randint(0, 2, (4,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "normalise_rows",
    "GG101",
    ("feats",),
    """
class Proj(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)
    def forward(self, x):
        feats = self.fc(x)
        feats /= feats.norm(dim=1, keepdim=True)  #!
        return feats
net = Proj()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def nt_xent(a, b):
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))
for epoch in range(2):
    x = torch.randn(6, 4)
    loss = nt_xent(net(x), net(x + 0.1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "forward_hook_mask",
    "GG101",
    ("prune_hook",),
    """
mask = (torch.rand(8) > 0.5).float()
def prune_hook(module, args, output):
    output.mul_(mask)  #!
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
net[1].register_forward_hook(prune_hook)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = net(torch.randn(3, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "message_passing",
    "GG101",
    ("h", "index_add_"),
    """
class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.msg = nn.Linear(d, d)
        self.upd = nn.Linear(d, d)
    def forward(self, h, src, dst):
        m = torch.relu(self.msg(h[src]))
        out = self.upd(h)
        h.index_add_(0, dst, m)  #!
        return torch.relu(h + out)
class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layers = nn.ModuleList([Layer(8) for _ in range(2)])
    def forward(self, x, src, dst):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, src, dst)
        return h.sum()
g = GNN()
opt = torch.optim.Adam(g.parameters())
for _ in range(2):
    loss = g(torch.randn(5, 3), torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "sinkhorn",
    "GG101",
    ("K",),
    """
def sinkhorn(cost, n_iter=3):
    K = torch.exp(-cost)
    for _ in range(n_iter):
        K /= K.sum(dim=1, keepdim=True)  #!
        K /= K.sum(dim=0, keepdim=True)  #!
    return K
emb = nn.Linear(3, 4)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
x = torch.randn(5, 3)
for _ in range(2):
    z = emb(x)
    cost = torch.cdist(z, z.flip(0))
    plan = sinkhorn(cost)
    loss = (plan * cost).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "custom_function",
    "GG101",
    ("Scale",),
    """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)
w = nn.Parameter(torch.ones(3))
opt = torch.optim.SGD([w], lr=0.1)
lin = nn.Linear(3, 3)
for _ in range(2):
    h = lin(torch.randn(4, 3))
    y = Scale.apply(h, w)
    h.zero_()  #!
    loss = y.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "noise_buffer",
    "GG101",
    ("noise",),
    """
net = nn.Linear(3, 1)
noise = torch.empty(4, 3)
x = torch.randn(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    losses = []
    for _ in range(3):
        noise.normal_()  #!
        losses.append(net(noise).pow(2).mean())
    loss = torch.stack(losses).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "shared_encoder",
    "GG102",
    ("opt_a", "encoder"),
    """
encoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
head_a, head_b = nn.Linear(4, 1), nn.Linear(4, 2)
opt_a = torch.optim.Adam([*encoder.parameters(), *head_a.parameters()])
opt_b = torch.optim.Adam([*encoder.parameters(), *head_b.parameters()])
for step in range(3):
    z = encoder(torch.randn(5, 3))
    loss_a = head_a(z).pow(2).mean()
    loss_b = F.cross_entropy(head_b(z), torch.zeros(5).long())
    opt_a.zero_grad()
    loss_a.backward(retain_graph=True)
    opt_a.step()  #!
    opt_b.zero_grad()
    loss_b.backward()
    opt_b.step()
""",
)

_add(
    "trainer_class",
    "GG102",
    ("self.opt_d", "fake"),
    """
class Trainer:
    def __init__(self):
        self.g = nn.Linear(2, 3)
        self.d = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
        self.opt_g = torch.optim.Adam(self.g.parameters())
        self.opt_d = torch.optim.Adam(self.d.parameters())
    def step_d(self, real, fake):
        loss = self.d(fake.detach()).mean() - self.d(real).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()  #!
    def step_g(self, score):
        loss = -score.mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
    def train(self):
        for _ in range(2):
            fake = self.g(torch.randn(4, 2))
            score = self.d(fake)
            self.step_d(torch.randn(4, 3), fake)
            self.step_g(score)
Trainer().train()
""",
)

_add(
    "scaler_step",
    "GG102",
    ("opt",),
    """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def closure_update(loss, retain):
    opt.zero_grad()
    loss.backward(retain_graph=retain)
    opt.step()  #!
for _ in range(2):
    out = net(torch.randn(4, 3))
    closure_update(out.mean(), True)
    closure_update(out.pow(2).mean(), False)
""",
)

_add(
    "hidden_buffer",
    "GG108",
    ("hidden",),
    """
class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.register_buffer("hidden", torch.zeros(2, 4))
    def forward(self, x):
        h = self.cell(x, self.hidden)
        self.hidden.copy_(h.detach())  #!
        return h
net = Stateful()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = sum(net(torch.randn(2, 3)).pow(2).mean() for _ in range(3))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "centers_buffer",
    "GG108",
    ("centers",),
    """
class CenterLoss(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.register_buffer("centers", torch.randn(n, d))
    def forward(self, f, y):
        sim = f @ self.centers.t()
        for c in y.unique():
            self.centers[c] += 0.5 * (f[y == c].mean(0).detach() - self.centers[c])  #!
        return F.cross_entropy(sim, y)
net, center = nn.Linear(3, 4), CenterLoss(2, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = center(net(torch.randn(6, 3)), torch.tensor([0, 1, 0, 1, 0, 1]))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "forget_gate",
    "GG104",
    ("bias",),
    """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        for name, p in self.lstm.named_parameters():
            if "bias" in name:
                n = p.size(0)
                p[n // 4:n // 2].fill_(1.0)  #!
Model()
""",
)

_add(
    "pgd",
    "GG103",
    ("adv",),
    """
net = nn.Linear(3, 2)
x, y = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
adv = x.clone().requires_grad_(True)
for _ in range(3):
    loss = F.cross_entropy(net(adv), y)
    loss.backward()
    adv += 0.1 * adv.grad.sign()  #!
""",
)

_add(
    "split_list",
    "GG105",
    ("parts",),
    """
head = nn.Linear(3, 6)
def decode(raw):
    parts = torch.split(raw, 2, dim=-1)
    parts[0].sigmoid_()  #!
    return parts
for _ in range(2):
    xy, wh, cls = decode(head(torch.randn(4, 3)))
    loss = (xy * wh).sum() + cls.sum()
    loss.backward()
""",
)

_add(
    "expanded_state",
    "GG104",
    ("state", "h0"),
    """
class Dec(nn.Module):
    def __init__(self):
        super().__init__()
        self.h0 = nn.Parameter(torch.zeros(1, 4))
        self.cell = nn.GRUCell(2, 4)
    def forward(self, x):
        state = self.h0.expand(x.size(0), -1)  #!
        state[:, 0] = 1.0  #!
        return self.cell(x, state)
net = Dec()
net(torch.randn(3, 2)).sum().backward()
""",
)

_add(
    "inplace_act_after_product",
    "GG101",
    ("nn.ReLU(inplace=True)",),
    """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.act = nn.ReLU(inplace=True)  #!
    def forward(self, x):
        s = x * self.w
        x = self.act(x)  #!
        return s + x
net = nn.Sequential(nn.Linear(4, 4), Scale(), nn.SiLU(inplace=True))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = net(torch.randn(2, 4)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "time_loop_attr",
    "GG101",
    ("self.memory",),
    """
class NTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.ctrl = nn.Linear(4, 4)
        self.memory = torch.zeros(2, 5, 4)
    def reset(self):
        self.memory = torch.zeros(2, 5, 4)
    def forward(self, x, t):
        key = self.ctrl(x)
        read = torch.bmm(self.memory, key.unsqueeze(-1)).squeeze(-1)
        self.memory[:, t] = key  #!
        return read.sum()
net = NTM()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    net.reset()
    loss = 0
    for t in range(5):
        loss = loss + net(torch.randn(2, 4), t)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
)

_add(
    "mask_logits_sampling",
    "GG101",
    ("log_probs",),
    """
net = nn.Linear(4, 6)
opt = torch.optim.Adam(net.parameters())
def choose(log_probs, used):
    log_probs[used] = float("-inf")  #!
    return log_probs.argmax()
for step in range(2):
    logits = net(torch.randn(4))
    used = torch.zeros(6, dtype=torch.bool)
    total = 0.0
    log_probs = F.log_softmax(logits, dim=-1)
    for _ in range(3):
        a = choose(log_probs, used)
        used = used.clone()
        used[a] = True
        total = total + log_probs[a]
    opt.zero_grad()
    (-total).backward()
    opt.step()
""",
)

_add(
    "cpu_numpy_softmax",
    "GG101",
    ("attn",),
    """
def top_k(attn, k):
    weights = attn.detach().cpu().numpy()
    for row in weights:
        row[np.argsort(row)[:-k]] = 0.0  #!
    return weights.mean()
net = nn.Linear(4, 6)
for _ in range(2):
    attn = torch.softmax(net(torch.randn(3, 4)), dim=-1)
    score = top_k(attn, 2)
    loss = (attn * torch.arange(6.0)).sum()
    loss.backward()
""",
    silent=True,
)

_add(
    "data_ema_stale",
    "GG109",
    ("critic",),
    """
critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
gen = nn.Linear(2, 3)
opt = torch.optim.SGD([*gen.parameters(), *critic.parameters()], lr=0.1)
for _ in range(2):
    score = critic(gen(torch.randn(4, 2)))
    for p in critic.parameters():
        p.data.clamp_(-0.05, 0.05)  #!
    loss = -score.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    silent=True,
)
