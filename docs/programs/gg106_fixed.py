import torch
from torch import nn

torch.manual_seed(0)
backbone, scale = nn.Linear(8, 8), nn.Parameter(torch.ones(4))
features = backbone(torch.randn(16, 8))
left = features[:, :4]
left = left * scale
(left.sum() + features[:, 4:].sum()).backward()
