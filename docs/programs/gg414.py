import torch
from torch import nn

torch.manual_seed(0)


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = [nn.Linear(4, 1) for _ in range(3)]

    def forward(self, x):
        return sum(member(x) for member in self.members)


model = Ensemble()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 4)).pow(2).mean().backward()
optimizer.step()
