import torch
from torch import nn

torch.manual_seed(0)
model = nn.LSTM(4, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.randn(20, 2, 4))[0].pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
