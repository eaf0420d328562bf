import torch
from torch import nn

torch.manual_seed(0)
encoder, left, right = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
parameters = [*encoder.parameters(), *left.parameters(), *right.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
for step in range(3):
    features = encoder(torch.randn(16, 4)).tanh()
    left_loss = left(features).pow(2).mean()
    right_loss = (right(features) - 1).pow(2).mean()
    optimizer.zero_grad()
    (left_loss + right_loss).backward()
    optimizer.step()
