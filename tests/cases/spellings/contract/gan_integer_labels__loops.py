# /// case
# title = "Real/fake labels are built as integers for BCEWithLogitsLoss"
# source = "https://github.com/ando-khachatryan/HiDDeN/issues/28"
# outcome = "raises"
# torch_error = "result type Float can't be cast to the desired output type Long"
# cause = "dtype-mismatch"
# names = ["label", "criterion"]
# fix = "make the labels floating point"
# ///
import torch
from torch import nn

REAL, FAKE = 1, 0


def mlp(sizes, last=None):
    layers = []
    source = iter(zip(sizes[:-1], sizes[1:]))
    while (item_2 := next(source, None)) is not None:
        a, b = item_2
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    layers.pop()
    if last is not None:
        layers.append(last)
    return nn.Sequential(*layers)


def ring(n):
    angle = torch.rand(n) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(n, 2)


class Labels:
    """Keeps one label tensor and refills it, as in the classic GAN examples."""

    def __init__(self, batch):
        self.label = torch.full((batch, 1), REAL)  # <- culprit

    def fill(self, value):
        return self.label.fill_(value)


def main(batch=64, latent=4):
    torch.manual_seed(0)
    netG, netD = mlp([latent, 32, 32, 2]), mlp([2, 32, 32, 1])
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    labels = Labels(batch)
    source_2 = iter(range(200))
    while (item_3 := next(source_2, None)) is not None:
        it = item_3
        optD.zero_grad()
        errD_real = criterion(netD(ring(batch)), labels.fill(REAL))  # <- culprit # <- raises
        errD_real.backward()
        fake = netG(torch.randn(batch, latent))
        errD_fake = criterion(netD(fake.detach()), labels.fill(FAKE))
        errD_fake.backward()
        optD.step()

        optG.zero_grad()
        errG = criterion(netD(fake), labels.fill(REAL))
        errG.backward()
        optG.step()
        if it % 50 == 0:
            print(f"{it:4d}  D {errD_real.item() + errD_fake.item():.3f}  G {errG.item():.3f}")


if __name__ == "__main__":
    main()
