import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for parameter in model.parameters():
    parameter.requires_grad = False
model[2] = nn.Linear(8, 2)  # the new head is to be trained
loss = nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(0, 2, (16,)))
loss.backward()
