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

from gan_integer_labels__split_parts import FAKE, Labels, REAL, mlp, ring


def main(batch=64, latent=4):
    torch.manual_seed(0)
    netG, netD = mlp([latent, 32, 32, 2]), mlp([2, 32, 32, 1])
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    labels = Labels(batch)
    for it in range(200):
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
