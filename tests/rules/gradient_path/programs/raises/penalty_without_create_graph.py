# expect: GG302
# names: create_graph
import torch
from torch import nn

critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(2):
    x = torch.randn(6, 3, requires_grad=True)
    slope = torch.autograd.grad(critic(x).sum(), x)[0]  # BUG
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()
