# expect: GG306
# names: x, u
import torch
from torch import nn

net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.rand(32, 2, requires_grad=True)
u = net(x)
u_t = torch.autograd.grad(u.sum(), x[:, 0], create_graph=True)[0]  # BUG
(u_t**2).mean().backward()
