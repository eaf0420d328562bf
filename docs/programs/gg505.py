import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    inputs = torch.randn(16, 4)
    targets = inputs.sum(dim=1)
    loss = (model(inputs) - targets).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
