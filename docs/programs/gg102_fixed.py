import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
generator_optimizer = torch.optim.Adam(generator.parameters())
critic_optimizer = torch.optim.Adam(critic.parameters())
for step in range(3):
    real, fake = torch.randn(16, 2), generator(torch.randn(16, 4))
    fake_score = critic(fake)
    critic_loss = (fake_score - critic(real)).mean()
    critic_optimizer.zero_grad()
    critic_loss.backward(retain_graph=True)
    critic_optimizer.step()
    fake_score = critic(fake)
    generator_loss = -fake_score.mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()
