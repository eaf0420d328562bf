import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    points = model(torch.randn(6, 4))
    differences = points.unsqueeze(0) - points.unsqueeze(1)
    distances = differences.pow(2).sum(dim=2).sqrt()
    loss = (1 - distances).relu().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
