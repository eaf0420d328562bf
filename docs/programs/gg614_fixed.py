import torch
from torch import nn

torch.manual_seed(0)
encoder, left, right = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
left_optimizer = torch.optim.Adam([*encoder.parameters(), *left.parameters()])
right_optimizer = torch.optim.Adam(right.parameters())
for step in range(12):
    features = encoder(torch.randn(16, 4)).tanh()
    loss = left(features).pow(2).mean() + (right(features) - 1).pow(2).mean()
    left_optimizer.zero_grad()
    right_optimizer.zero_grad()
    loss.backward()
    left_optimizer.step()
    right_optimizer.step()
