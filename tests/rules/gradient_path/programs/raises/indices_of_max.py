# expect: GG304
# names: max
import torch
from torch import nn

model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))
for _ in range(2):
    logits = model(x)
    _, chosen = logits.max(dim=1)  # BUG
    loss = nn.functional.l1_loss(chosen.float(), y.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
