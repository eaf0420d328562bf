# expect: GG308
# names: create_graph
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(4):
    real, fake = torch.randn(6, 3), torch.randn(6, 3) + 1
    mixed = (0.5 * real + 0.5 * fake).requires_grad_(True)
    slope = torch.autograd.grad(critic(mixed).sum(), mixed)[0]  # BUG
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
