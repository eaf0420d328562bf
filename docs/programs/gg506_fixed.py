import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    inputs, labels = torch.randn(16, 4), torch.randint(0, 3, (16,))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
