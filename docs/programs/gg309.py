import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
real, fake = torch.randn(16, 2), torch.randn(16, 2)
between = 0.3 * real + 0.7 * fake
score = critic(between)
slope, = torch.autograd.grad(score.sum(), between, create_graph=True)
penalty = (slope.norm(dim=1) - 1).pow(2).mean()
penalty.backward()
