# expect: GG304
# names: requires_grad
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))
for _ in range(3):
    hits = model(x).argmax(1) == y  # BUG
    loss = 1 - hits.float().mean()
    loss.requires_grad = True  # BUG
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
