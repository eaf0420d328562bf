import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(8, 2), nn.Linear(2, 8)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
for step in range(3):
    inputs = torch.randn(16, 8)
    loss = nn.functional.mse_loss(decoder(encoder(inputs)), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
