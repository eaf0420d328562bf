# expect: GG308
# names: item
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def weight_penalty(module):
    return sum(p.pow(2).sum().item() for p in module.parameters())  # BUG


for _ in range(4):
    x = torch.randn(8, 4)
    loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    loss = loss + 0.01 * weight_penalty(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
