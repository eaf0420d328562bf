# /// case
# title = "Eikonal loss through a custom encoding that can be differentiated only once"
# source = "https://github.com/NVlabs/tiny-cuda-nn/issues/50"
# outcome = "raises"
# torch_error = "trying to differentiate twice a function that was marked with @once_differentiable"
# cause = "no-derivative"
# names = ["FrequencyEncode", "once_differentiable"]
# fix = "drop @once_differentiable (the backward is made of differentiable ops)"
# ///
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from eikonal_once_differentiable__split_parts import SignedDistance, surface_points


def main():
    torch.manual_seed(0)
    sdf = SignedDistance()
    optimizer = torch.optim.Adam(sdf.parameters(), lr=2e-3)
    for step in range(100):
        on_surface = sdf(surface_points(64)).abs().mean()
        space = (2 * torch.rand(128, 2) - 1).requires_grad_()
        normal, = torch.autograd.grad(sdf(space).sum(), space, create_graph=True)  # <- related
        eikonal = ((normal.norm(dim=1) - 1) ** 2).mean()
        loss = on_surface + 0.1 * eikonal
        optimizer.zero_grad()
        loss.backward()  # <- raises
        optimizer.step()
        if step % 25 == 0:
            print(f"{step:3d} surface {on_surface.item():.4f} eikonal {eikonal.item():.4f}")


if __name__ == "__main__":
    main()
