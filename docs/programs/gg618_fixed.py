import torch
from torch import nn

torch.manual_seed(0)
users = nn.Embedding(100, 8)
optimizer = torch.optim.Adam(users.parameters())
for step in range(3):
    loss = users(torch.randint(0, 100, (16,))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
