"""Sound training programs that look odd in their numbers: nothing may be said of them."""

from __future__ import annotations

SOUND: dict[str, str] = {
    "scaler": """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
for step in range(30):
    opt.zero_grad()
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 2, (8,)))
    scaler.scale(loss).backward()
    scaler.step(opt); scaler.update()
""",
    "scaler_grad": """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
for step in range(30):
    opt.zero_grad()
    loss = 1e3 * F.cross_entropy(net(torch.randn(8, 4) * 1e4), torch.randint(0, 2, (8,)))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt); scaler.update()
""",
    "own_skip": """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(12):
    opt.zero_grad()
    x = torch.randn(8, 4)
    y = net(x)
    loss = torch.where(y > 0, y.abs().sqrt(), y).mean() if step != 5 else (y * 0).sqrt().mean()
    loss.backward()
    n = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isfinite(n): opt.step()
""",
    "masked_ok": """
q = nn.Linear(4, 4)
opt = torch.optim.SGD(q.parameters(), 0.01)
for step in range(12):
    x = torch.randn(2, 5, 4)
    s = q(x) @ x.transpose(1, 2)
    m = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    w = s.masked_fill(m, float("-inf")).softmax(-1)
    add = torch.zeros(5, 5).masked_fill(m, float("-inf"))
    w2 = (s + add).softmax(-1)
    loss = (w @ x).pow(2).mean() + (w2 @ x).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "hinge_zero": """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
x = torch.randn(32, 4); y = (x[:, 0] > 0).float() * 2 - 1
for step in range(400):
    loss = F.relu(1 - y * net(x * 50).squeeze(1)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "converged": """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
x = torch.randn(64, 4); y = x.sum(1, keepdim=True) + 5 * torch.randn(64, 1)
for step in range(600):
    loss = (net(x) - y).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "lora_zero_init": """
A, B = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 1))
opt = torch.optim.SGD([A, B], 0.05)
for step in range(60):
    x = torch.randn(16, 4)
    loss = (x @ A @ B - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "lbfgs": """
w = nn.Parameter(torch.tensor([3.0]))
opt = torch.optim.LBFGS([w], lr=1, line_search_fn="strong_wolfe", max_iter=10)
for step in range(6):
    def closure():
        opt.zero_grad()
        loss = (w - w.log() * 40).sum()
        loss.backward()
        return loss
    opt.step(closure)
""",
    "kl_anneal": """
net = nn.Linear(4, 4); head = nn.Linear(4, 1)
opt = torch.optim.Adam([*net.parameters(), *head.parameters()], 1e-2)
for step in range(120):
    x = torch.randn(16, 4)
    beta = 0.0 if step < 80 else 0.1
    z = torch.sigmoid(net(x))
    loss = beta * z.pow(2).mean() + head(x).pow(2).mean() + 1
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "sqrt_eps_log": """
net = nn.Linear(4, 4)
opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(40):
    p = net(torch.randn(16, 4)).softmax(-1)
    d = torch.cdist(p, p) + torch.norm(p - p, dim=-1)[None]
    ok = p > 0.3
    safe = torch.where(ok, p, 1.0)
    loss = (torch.where(ok, safe.log(), 0.0)).mean() + d.mean() + (p.pow(2).sum(-1) + 1e-8).sqrt().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "separable_bce": """
net = nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), 50.0)
x = torch.cat([torch.full((16, 1), -3.0), torch.full((16, 1), 3.0)]); y = (x > 0).float()
for step in range(200):
    loss = F.binary_cross_entropy(torch.sigmoid(net(x)), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "rl_spiky": """
net = nn.Linear(4, 1)
opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(80):
    scale = 10.0 ** (step % 9)
    loss = (net(torch.randn(8, 4)) * scale).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "relu_unused_expert": """
a, b = nn.Linear(4, 8), nn.Linear(8, 1)
c = nn.Linear(4, 1)
opt = torch.optim.SGD([*a.parameters(), *b.parameters(), *c.parameters()], 0.05)
with torch.no_grad(): a.bias[:4] = -40
for step in range(100):
    x = torch.randn(16, 4)
    loss = (b(torch.relu(a(x))) + c(x) - x.sum(1, keepdim=True)).pow(2).mean() + 0.5
    opt.zero_grad(); loss.backward(); opt.step()
""",
}
