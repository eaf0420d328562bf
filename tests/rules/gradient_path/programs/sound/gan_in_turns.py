import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
g_opt, d_opt = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for _ in range(4):
    real, noise = torch.randn(8, 3), torch.randn(8, 2)
    fake = generator(noise)
    d_loss = critic(fake.detach()).mean() - critic(real).mean()
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    with torch.no_grad():
        reference = critic(real).mean()
    g_loss = reference - critic(fake).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
