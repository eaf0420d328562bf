import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder, codebook = nn.Linear(6, 3), nn.Linear(3, 6), nn.Embedding(5, 3)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *codebook.parameters()])
for _ in range(4):
    x = torch.randn(8, 6)
    z = encoder(x)
    q = codebook(torch.cdist(z, codebook.weight).argmin(1))
    commit = (z - q.detach()).pow(2).mean()
    embed = (q - z.detach()).pow(2).mean()
    through = z + (q - z).detach()
    loss = (decoder(through) - x).pow(2).mean() + embed + 0.25 * commit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
