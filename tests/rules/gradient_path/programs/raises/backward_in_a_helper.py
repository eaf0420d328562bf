# expect: GG302
# names: energy, tolist
import torch
from torch import nn


class Trainer:
    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters())

    def energy(self, x):
        values = self.net(x).squeeze(1).tolist()  # BUG
        return torch.tensor(values).logsumexp(0)

    def apply(self, objective):
        self.optimizer.zero_grad()
        objective.backward()
        self.optimizer.step()

    def fit(self, steps):
        for _ in range(steps):
            x = torch.randn(9, 4)
            self.apply(self.energy(x))


Trainer(nn.Linear(4, 1)).fit(2)
