import torch
from torch import nn

torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, observation):
        return torch.tanh(self.net(observation))


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for step in range(100):
    prices = 20_000 + 40_000 * torch.rand(32, 6)
    action = policy((prices - 40_000) / 12_000)
    loss = (action - 0.3).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
