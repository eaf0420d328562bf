import torch
from torch import nn

torch.manual_seed(0)
backbone, scale = nn.Linear(8, 8), nn.Parameter(torch.ones(4))
features = backbone(torch.randn(16, 8))
with torch.no_grad():
    left = features[:, :4]
left.mul_(scale)
features.sum().backward()
