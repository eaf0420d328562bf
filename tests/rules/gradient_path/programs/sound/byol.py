import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
online, predictor = nn.Linear(6, 4), nn.Linear(4, 4)
target = copy.deepcopy(online)
optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()])


def half(x1, x2):
    p = F.normalize(predictor(online(x1)), dim=-1)
    z = F.normalize(target(x2), dim=-1).detach()
    return 2 - 2 * (p * z).sum(-1).mean()


for _ in range(4):
    x1, x2 = torch.randn(8, 6), torch.randn(8, 6)
    loss = half(x1, x2) + half(x2, x1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(online.parameters(), target.parameters(), strict=True):
            q.mul_(0.9).add_(0.1 * p)
