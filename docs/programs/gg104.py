import torch
from torch import nn

torch.manual_seed(0)


class Embedding(nn.Module):
    def __init__(self, rows, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, size))
        self.weight[0] = 0.0

    def forward(self, numbers):
        return self.weight[numbers]


embedding = Embedding(10, 4)
embedding(torch.tensor([0, 3])).sum().backward()
