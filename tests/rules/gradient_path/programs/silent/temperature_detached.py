# expect: GG308
# names: log_sigma
import torch
from torch import nn

torch.manual_seed(0)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_sigma = nn.Parameter(torch.zeros(()))

    def forward(self, error):
        weight = (-2 * self.log_sigma.data).exp()  # BUG
        return weight * error + self.log_sigma


model, balance = nn.Linear(4, 1), Weighted()
optimizer = torch.optim.Adam([*model.parameters(), *balance.parameters()])
for _ in range(4):
    x = torch.randn(8, 4)
    loss = balance((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
