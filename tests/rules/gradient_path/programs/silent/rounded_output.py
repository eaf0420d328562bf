# expect: GG304
# names: round
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(8, 4)
    levels = torch.round(model(x) * 10) / 10  # BUG
    loss = nn.functional.mse_loss(levels, x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
