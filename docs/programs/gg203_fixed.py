import torch
from torch import nn

torch.manual_seed(0)
rnn, head = nn.GRU(3, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
series, state = torch.randn(41, 2, 3), None
for start in range(0, 40, 10):
    output, state = rnn(series[start : start + 10], state)
    loss = nn.functional.mse_loss(head(output), series[start + 1 : start + 11])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = state.detach()
