import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(8, 4), nn.Linear(4, 1)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for step in range(12):
    inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
    loss = nn.functional.mse_loss(head(encoder(inputs).relu()), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
