import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
decoder.weight.data = encoder.weight.data.t()
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
for step in range(12):
    inputs = torch.randn(16, 8)
    loss = nn.functional.mse_loss(decoder(encoder(inputs)), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
