import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for step in range(3):
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    loss = nn.functional.mse_loss(model(inputs), targets)
    total = total + loss
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    print(f"mean loss {total / (step + 1):.3f}")
