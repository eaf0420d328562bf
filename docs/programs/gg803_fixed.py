import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
anchors, places = model(torch.randn(1 << 20, 3)), torch.randn(1, 1 << 20)
distances = (anchors - places.t()).abs()
distances.mean().backward()
