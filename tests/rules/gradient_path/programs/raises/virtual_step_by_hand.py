# expect: GG306
# names: alpha
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
alpha = torch.ones(8, requires_grad=True)
x, y = torch.randn(8, 4), torch.randn(8, 1)
for _ in range(2):
    inner = (alpha * (net(x) - y).pow(2).squeeze(1)).mean()
    grads = torch.autograd.grad(inner, list(net.parameters()))
    with torch.no_grad():
        for p, g in zip(net.parameters(), grads, strict=True):
            p -= 0.1 * g  # BUG
    outer = (net(x) - y).pow(2).mean()
    meta = torch.autograd.grad(outer, alpha)[0]
