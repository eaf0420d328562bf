# /// case
# title = "SVD of a weight that starts as the identity has equal singular values"
# source = "https://github.com/pytorch/pytorch/issues/49886"
# outcome = "raises"
# torch_error = "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values"
# cause = "nonfinite-backward"
# names = ["svd", "mix", "eye_"]
# fix = "break the degeneracy: perturb the identity initialisation"
# ///
import torch
from torch import nn

from svd_identity_init__split_parts import Unmixer, recordings


def main():
    torch.manual_seed(0)
    mixing = torch.randn(3, 8)
    model = Unmixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(120):
        x, sources = recordings(64, mixing)
        loss = (model(x) - sources).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
