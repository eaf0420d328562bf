import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(1000, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
batches = []
for step in range(150):
    inputs, targets = torch.randn(256, 1000), torch.randn(256, 1)
    batches.append(inputs)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
