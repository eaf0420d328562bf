# expect: GG303
# names: model, fc
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.body(x))


def prepare(classes):
    model = Net()
    model.fc = nn.Linear(8, classes)
    for p in model.parameters():
        p.requires_grad = False  # BUG
    return model


model = prepare(3)
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
for _ in range(2):
    loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
