# expect: GG301
# names: set_grad_enabled, validate
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def validate(x, y):
    model.eval()
    torch.set_grad_enabled(False)  # BUG
    error = nn.functional.mse_loss(model(x), y).item()
    model.train()
    return error


def batch():
    x = torch.randn(8, 4)
    return x, x.sum(1, keepdim=True)


for _epoch in range(2):
    for _ in range(2):
        x, y = batch()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    validate(*batch())
