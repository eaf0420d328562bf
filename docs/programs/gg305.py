import torch
from torch import nn

torch.manual_seed(0)
backbone, head = nn.Linear(8, 4), nn.Linear(4, 2)
with torch.inference_mode():
    features = backbone(torch.randn(16, 8))
loss = nn.functional.cross_entropy(head(features), torch.randint(0, 2, (16,)))
loss.backward()
