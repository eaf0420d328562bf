import torch
from torch import nn

torch.manual_seed(0)
model, log_scale = nn.Linear(4, 1), nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([*model.parameters(), log_scale], lr=0.1)
for step in range(3):
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    scale = log_scale.exp()
    loss = ((model(inputs) - targets) / scale).pow(2).mean() + log_scale.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
