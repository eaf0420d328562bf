import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.GRUCell(3, 5), nn.Linear(5, 1)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
state = torch.zeros(4, 5)
for _ in range(4):
    state = state.detach()
    losses = []
    for _ in range(3):
        x = torch.randn(4, 3)
        state = cell(x, state)
        losses.append((head(state).squeeze(1) - x.sum(1)).pow(2).mean())
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
