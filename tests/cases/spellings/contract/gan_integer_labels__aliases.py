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
    for a, b in zip(sizes[:-1], sizes[1:]):
        part = nn.Linear(a, b)
        layers += [part, nn.LeakyReLU(0.2)]
    pop_ = layers.pop
    pop_()
    if last is not None:
        append_ = layers.append
        append_(last)
    return nn.Sequential(*layers)


def ring(n):
    part_ = torch.rand(n)
    angle = part_ * 6.2832
    cos_ = angle.cos
    return torch.stack([cos_(), angle.sin()], 1) + 0.02 * torch.randn(n, 2)


class Labels:
    """Keeps one label tensor and refills it, as in the classic GAN examples."""

    def __init__(self, batch):
        self.label = torch.full((batch, 1), REAL)  # <- culprit

    def fill(self, value):
        fill__ = self.label.fill_
        return fill__(value)


def main(batch=64, latent=4):
    torch.manual_seed(0)
    part__5 = mlp([latent, 32, 32, 2])
    netG, netD = part__5, mlp([2, 32, 32, 1])
    optG, optD = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999)), torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    labels = Labels(batch)
    for it in range(200):
        clear = optD.zero_grad
        clear()
        part__2 = netD(ring(batch))  # <- culprit  # <- raises
        errD_real = criterion(part__2, labels.fill(REAL))  # <- culprit # <- raises
        differentiate = errD_real.backward
        differentiate()
        part__3 = torch.randn(batch, latent)
        fake = netG(part__3)
        detach_ = fake.detach
        errD_fake = criterion(netD(detach_()), labels.fill(FAKE))
        differentiate_ = errD_fake.backward
        differentiate_()
        go = optD.step
        go()

        clear_ = optG.zero_grad
        clear_()
        part__4 = netD(fake)
        errG = criterion(part__4, labels.fill(REAL))
        differentiate__2 = errG.backward
        differentiate__2()
        go_ = optG.step
        go_()
        if it % 50 == 0:
            print(f"{it:4d}  D {errD_real.item() + errD_fake.item():.3f}  G {errG.item():.3f}")


if __name__ == "__main__":
    main()
