# expect: GG304
# names: sample, action
import torch
from torch import nn
from torch.distributions import Normal

actor = nn.Linear(3, 2)
optimizer = torch.optim.Adam(actor.parameters())
for _ in range(2):
    state = torch.randn(16, 3)
    policy = Normal(actor(state), 0.3)
    action = policy.sample()  # BUG
    cost = (action - state[:, :2]).pow(2).sum(1)
    loss = cost.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
