# expect: GG302
# names: losses
import torch
from torch import nn

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
log = []
for _ in range(2):
    losses = []
    for k in range(3):
        x = torch.randn(8, 4)
        loss = nn.functional.cross_entropy(model(x), torch.full((8,), k))
        log.append(loss.detach())
        losses.append(loss.detach())  # BUG
    total = torch.stack(losses).sum()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
