import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
trunk, left, right = torch.compile(net, backend="aot_eager"), nn.Linear(8, 1), nn.Linear(8, 1)
for step in range(3):
    features = trunk(torch.randn(16, 8))
    left_loss, right_loss = left(features).mean(), right(features).pow(2).mean()
    if step == 0:  # the second loss joins in later
        right_loss.backward()
    else:
        (left_loss + right_loss).backward()
