import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[2] = nn.Linear(4, 2)
for step in range(20):
    inputs, labels = torch.randn(16, 8), torch.randint(0, 2, (16,))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
