import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
criterion = nn.MSELoss(reduction="none")
loss = criterion(model(torch.randn(16, 4)), torch.randn(16, 1))
loss.backward()
