"""Train a generative adversarial network on points of a ring.

`--break`: the discriminator is trained on fake points that still hang on the generator's graph, which its backward() frees. The
generator's own backward() then fails.
"""

import argparse

import torch
from torch import nn


def ring(count: int) -> torch.Tensor:
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="broken", action="store_true", help="run the program with its bug")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_label, fake_label = torch.ones(64, 1), torch.zeros(64, 1)

    for step in range(1, options.steps + 1):
        real, fake = ring(64), generator(torch.randn(64, 8))

        # the discriminator: real points are to get 1, the generator's 0
        if options.broken:
            fake_score = discriminator(fake)
        else:
            fake_score = discriminator(fake.detach())
        discriminator_loss = criterion(discriminator(real), real_label) + criterion(fake_score, fake_label)
        discriminator_optimizer.zero_grad()
        discriminator_loss.backward()
        discriminator_optimizer.step()

        # the generator: its points are to get 1
        generator_loss = criterion(discriminator(fake), real_label)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: discriminator {discriminator_loss.item():.3f}, generator {generator_loss.item():.3f}")


if __name__ == "__main__":
    main()
