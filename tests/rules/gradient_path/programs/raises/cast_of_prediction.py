# expect: GG304
# names: counts, long
import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1), nn.Softplus())

    def forward(self, x):
        counts = self.net(x).long()  # BUG
        return counts.float()


model = Counter()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(16, 3)
wanted = torch.randint(0, 5, (16, 1))
loss = (model(x) - wanted).abs().sum() / 16
loss.backward()
optimizer.step()
