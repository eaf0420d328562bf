import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(0)
actor, critic = nn.Linear(3, 2), nn.Linear(5, 1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
for _ in range(4):
    state = torch.randn(16, 3)
    mu = actor(state)
    dist = Normal(mu, torch.ones(2))
    action = dist.sample()
    q = critic(torch.cat([state, action], 1)).squeeze(1)
    reward = -(action - state[:, :2]).pow(2).sum(1)
    logp = -((action - mu) ** 2).sum(1) / 2
    loss = (q - reward).pow(2).mean() - (logp * (reward - q.detach())).mean() - 0.01 * dist.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
