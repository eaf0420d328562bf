import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    losses = {"fit": nn.functional.mse_loss(model(inputs), targets)}
    losses["size"] = 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
