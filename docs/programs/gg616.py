import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
accumulate = 4
for batch in range(32):
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    if (batch + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
