# expect: GG305
# names: inference_mode
import torch
from torch import nn


class Bank:
    def __init__(self, encoder):
        self.encoder = encoder
        self.features = None

    def fill(self, x):
        with torch.inference_mode():  # BUG
            self.features = self.encoder(x)


encoder, head = nn.Linear(4, 8), nn.Linear(8, 2)
bank = Bank(encoder)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
x, y = torch.randn(10, 4), torch.randint(0, 2, (10,))
bank.fill(x)
for _ in range(2):
    loss = nn.functional.cross_entropy(head(bank.features), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
