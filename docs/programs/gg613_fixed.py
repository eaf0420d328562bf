import torch
from torch import nn

torch.manual_seed(0)
backbone, head = nn.Linear(8, 4), nn.Linear(4, 1)
backbone.requires_grad_(False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(12):
    inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
    loss = nn.functional.mse_loss(head(backbone(inputs)), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
