import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
for step in range(3):
    loss = (model(inputs) - targets).pow(2).mean()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.add_(parameter.grad, alpha=-0.1)
