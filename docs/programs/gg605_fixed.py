import torch
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x).relu()
        hidden = self.second(hidden).relu()
        return self.head(hidden)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
