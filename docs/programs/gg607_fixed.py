import torch
from torch import nn

torch.manual_seed(0)
model, discriminator = nn.Linear(4, 2), nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
discriminator_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
for step in range(20):
    fake = model(torch.randn(16, 4))
    loss_d = (discriminator(fake.detach()) - discriminator(torch.randn(16, 2))).mean()
    discriminator_optimizer.zero_grad()
    loss_d.backward()
    discriminator_optimizer.step()
    loss = -discriminator(fake).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
