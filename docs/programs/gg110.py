import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.LSTMCell(4, 8), nn.Linear(8, 1)
state = torch.zeros(2, 16)
for step in range(3):
    h, c = state.chunk(2, dim=1)
    h, c = cell(torch.randn(2, 4), (h, c))
    loss = head(h).pow(2).mean()
    loss.backward()
    state = torch.cat([h, c], dim=1)
    h, c = state.chunk(2, dim=1)
    h.detach_()
    c.detach_()
    state = torch.cat([h, c], dim=1)
