import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    x = torch.randn(8, 4)
    soft = model(x)
    hard = soft + (soft.round() - soft).detach()
    loss = hard.mean() + (soft - soft.detach()).sum() + soft.pow(2).mean() / soft.pow(2).mean().detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
