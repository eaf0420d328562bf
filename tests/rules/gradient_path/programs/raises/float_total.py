# expect: GG302
# names: item
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    total = 0.0
    for _ in range(3):
        x = torch.randn(8, 4)
        loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
        total += loss.item() / 3  # BUG
    mean_loss = torch.tensor(total)  # BUG
    optimizer.zero_grad()
    mean_loss.backward()
    optimizer.step()
