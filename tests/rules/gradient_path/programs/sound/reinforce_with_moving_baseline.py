import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters())
baseline, history = 0.0, []
for _ in range(4):
    dist = Categorical(logits=policy(torch.randn(16, 4)))
    action = dist.sample()
    reward = action.float() + torch.randn(16)
    advantage = reward - baseline
    loss = -(dist.log_prob(action) * advantage).mean() + 0.01 * (dist.probs * dist.logits).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    history.append(loss.item())
    accuracy = (dist.probs.argmax(-1) == action).float().mean().item()
