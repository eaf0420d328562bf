# expect: GG302
# names: predictions
import torch
from torch import nn

cell = nn.GRUCell(3, 5)
head = nn.Linear(5, 1)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
series = torch.randn(7, 4, 3)
for _ in range(2):
    state = torch.zeros(4, 5)
    predictions = torch.zeros(7, 4)
    for t in range(7):
        state = cell(series[t], state)
        predictions[t] = head(state).squeeze(1).data  # BUG
    loss = (predictions - series.sum(2)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
