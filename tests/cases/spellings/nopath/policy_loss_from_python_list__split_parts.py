import torch
import torch.nn as nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self, obs_dim=3, hidden=24, n_actions=2):
        super().__init__()
        self.body = nn.Linear(obs_dim, hidden)
        self.logits = nn.Linear(hidden, n_actions)

    def forward(self, obs):
        return Categorical(logits=self.logits(torch.relu(self.body(obs))))


class BalanceEnv:
    """Keep a noisy scalar near zero by pushing left or right."""

    def reset(self):
        self.x, self.v, self.t = torch.randn(()).item() * 0.5, 0.0, 0
        return self.obs()

    def obs(self):
        return torch.tensor([self.x, self.v, 1.0])

    def step(self, action):
        self.v = 0.8 * self.v + 0.2 * (2 * action - 1) + 0.02 * torch.randn(()).item()
        self.x += self.v
        self.t += 1
        return self.obs(), 1.0 - min(abs(self.x), 2.0), self.t >= 20


def discounted(rewards, gamma=0.9):
    out, running = [], 0.0
    for r in reversed(rewards):
        running = r + gamma * running
        out.insert(0, running)
    return out
