import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(0)
policy, value = nn.Linear(3, 2), nn.Linear(3, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()])
for _ in range(3):
    with torch.no_grad():
        state = torch.randn(16, 3)
        dist = Normal(policy(state), 1.0)
        action = dist.sample()
        old = dist.log_prob(action).sum(-1)
        baseline = value(state).squeeze(-1)
    returns = torch.randn(16)
    for _ in range(3):
        dist = Normal(policy(state), 1.0)
        logp = dist.log_prob(action).sum(-1)
        advantage = returns - baseline
        ratio = (logp - old).exp()
        kl = (old - logp).mean()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -surrogate.mean() + 0.1 * kl + 0.5 * (returns - value(state).squeeze(-1)).pow(2).mean() - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
