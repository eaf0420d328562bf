import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
multiplier = nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([*model.parameters(), multiplier], lr=0.01)
for _ in range(4):
    x = torch.randn(8, 4)
    out = model(x)
    objective = (out - x.sum(1, keepdim=True)).pow(2).mean()
    violation = out.abs().mean() - 0.5
    loss = objective + multiplier.detach() * violation - multiplier * violation.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
