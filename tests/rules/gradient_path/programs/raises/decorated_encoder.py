# expect: GG301
# names: encode, torch.no_grad
import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 3)

    @torch.no_grad()  # BUG
    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def forward(self, x):
        code = self.encode(x)
        return code @ code.t()


def train_step(model, optimizer, x):
    gram = model(x)
    loss = (gram - torch.eye(len(x))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    train_step(model, optimizer, torch.randn(5, 6))
