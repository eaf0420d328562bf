import torch
import torch.nn as nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self, n_states=8, n_actions=3):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(n_states, 16), nn.Tanh(), nn.Linear(16, n_actions))

    def forward(self, state):
        return Categorical(logits=self.net(state))


def update(policy, optimizer, states, actions, advantages, old_log_prob, clip=0.2):
    ratio = (policy(states).log_prob(actions) - old_log_prob).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    loss = -surrogate.mean() - 0.01 * policy(states).entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- related
    return loss.item()


def rollout(policy, n=256):
    states = torch.randint(0, 8, (n,))
    with torch.no_grad():
        dist = policy(states)
        actions = dist.sample()
        log_prob = dist.log_prob(actions)
    rewards = (actions == states % 3).float()
    return states, actions, rewards, log_prob
