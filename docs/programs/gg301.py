import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def loss_of(inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)


for step in range(3):
    loss = loss_of(torch.randn(16, 4), torch.randn(16, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
