"""Programs that look like the broken ones and are right: nothing may be said of them."""

from __future__ import annotations

_HEAD = """
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""

_PROGRAMS: dict[str, str] = {
    "relu_after_conv": """
net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 1, 3), nn.ReLU(inplace=True))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net(torch.randn(2, 1, 8, 8)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "gradcheck_of_a_product": """
a = torch.randn(3, dtype=torch.double, requires_grad=True)
b = torch.randn(3, dtype=torch.double, requires_grad=True)
assert torch.autograd.gradcheck(lambda x, y: x * y, (a, b))
assert torch.autograd.gradgradcheck(lambda x, y: x * y.exp(), (a, b))
""",
    "put_back_through_data": """
w = torch.randn(3, requires_grad=True)
loss = (w * w.exp()).sum()
kept = w.data.clone()
for i in range(3):
    w.data[i] = kept[i] + 0.1
    w.data[i] = kept[i]
w.data.mul_(2.0)
w.data.copy_(kept)
loss.backward()
""",
    "manual_sgd_through_data": """
net = nn.Linear(3, 1)
for _ in range(4):
    loss = net(torch.randn(5, 3)).pow(2).mean()
    net.zero_grad()
    loss.backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-0.1)
""",
    "weight_clipping_after_step": """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt = torch.optim.RMSprop(net.parameters())
for _ in range(4):
    loss = net(torch.randn(5, 3)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for p in net.parameters():
        p.data.clamp_(-0.1, 0.1)
""",
    "teacher_updated_after_step": """
student, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 3)
    with torch.no_grad():
        target = teacher(x)
    loss = F.mse_loss(student(x), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.data.mul_(0.9).add_(s.data, alpha=0.1)
""",
    "teacher_through_data_before_backward": """
student, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 3)
    loss = F.mse_loss(student(x), teacher(x))
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.data.mul_(0.9).add_(s.data, alpha=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "numpy_metric_on_a_copy": """
net = nn.Linear(3, 1)
for _ in range(3):
    probs = torch.sigmoid(net(torch.randn(4, 3)))
    pred = probs.detach().numpy().copy()
    pred[pred > 0.5] = 1.0
    probs.mean().backward()
""",
    "numpy_metric_that_only_reads": """
net = nn.Linear(3, 1)
for _ in range(3):
    probs = torch.sigmoid(net(torch.randn(4, 3)))
    array = probs.detach().numpy()
    hits = (array > 0.5).sum()
    probs.mean().backward()
""",
    "staging_buffer_filled_after_backward": """
buffer = np.zeros((4, 3), dtype=np.float32)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    buffer[:] = np.random.randn(4, 3)
    loss = net(torch.from_numpy(buffer)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "numpy_write_after_backward": """
w = torch.rand(4, requires_grad=True)
for _ in range(3):
    out = torch.sigmoid(w)
    array = out.detach().numpy()
    out.sum().backward()
    array[:] = 0.0
""",
    "buffer_updated_after_clone": """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        out = self.weight * self.mean.clone() + x * self.weight
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return out

norm = Norm()
for _ in range(3):
    norm(torch.randn(4, 3)).sum().backward()
""",
    "logits_data_read": """
net = nn.Linear(3, 2)
for _ in range(3):
    logits = net(torch.randn(4, 3))
    best = logits.data.max(1)[1]
    F.cross_entropy(logits, best).backward()
""",
    "adversarial_step_through_data": """
net = nn.Linear(3, 1)
x = torch.randn(4, 3, requires_grad=True)
for _ in range(4):
    loss = net(x).sum()
    grad, = torch.autograd.grad(loss, x)
    x.data.add_(0.1 * grad.sign()).clamp_(-1, 1)
""",
    "weights_swapped_after_backward": """
scale = nn.Parameter(torch.rand(4))
average = scale.detach().clone()
opt = torch.optim.SGD([scale], lr=0.1)
for _ in range(4):
    loss = (torch.tanh(torch.randn(8, 4) * scale) * scale).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    average = 0.9 * average + 0.1 * scale.detach()
    kept = scale.data
    scale.data = average.clone()
    (torch.randn(8, 4) * scale.detach()).sum().item()
    scale.data = kept
""",
    "the_same_memory_set_again": """
net = nn.Linear(3, 1)
average = [p.detach() * 0.9 for p in net.parameters()]
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    opt.zero_grad()
    loss = net(torch.randn(5, 3)).pow(2).mean()
    for p, q in zip(net.parameters(), average):
        p.data = q
    loss.backward()
    opt.step()
""",
    "two_views_through_one_batch_norm": """
encoder = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
for step in range(3):
    one, two = encoder(torch.randn(8, 3)), encoder(torch.randn(8, 3))
    loss = (one - two).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "gradient_clipping_and_lbfgs": """
net = nn.Linear(3, 1)
opt = torch.optim.LBFGS(net.parameters(), max_iter=3)
x, y = torch.randn(5, 3), torch.randn(5, 1)

def closure():
    opt.zero_grad()
    loss = F.mse_loss(net(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return loss

for _ in range(2):
    opt.step(closure)
""",
}

SOUND: dict[str, str] = {slug: _HEAD + program for slug, program in _PROGRAMS.items()}
