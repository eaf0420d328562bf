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


class FrequencyEncode(Function):
    @staticmethod
    def forward(ctx, points, freqs):
        phase = points.unsqueeze(-1) * freqs
        ctx.save_for_backward(points, freqs)
        return torch.cat([phase.sin(), phase.cos()], -1).flatten(1)

    @staticmethod
    @once_differentiable  # <- culprit
    def backward(ctx, grad_code):
        points, freqs = ctx.saved_tensors
        phase = points.unsqueeze(-1) * freqs
        g_sin, g_cos = grad_code.view(*points.shape, -1).chunk(2, -1)
        grad_points = ((g_sin * phase.cos() - g_cos * phase.sin()) * freqs).sum(-1)
        return grad_points, None


def signed_distance_forward(owner, points):
    code = FrequencyEncode.apply(points, owner.freqs)
    return owner.mlp(torch.cat([points, code], 1)).squeeze(1)


class SignedDistance(nn.Module):
    def __init__(self, levels=3, width=48):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(levels))
        self.mlp = nn.Sequential(nn.Linear(2 + 4 * levels, width), nn.Softplus(beta=10),
                                 nn.Linear(width, width), nn.Softplus(beta=10), nn.Linear(width, 1))

    def forward(self, points):
        return signed_distance_forward(self, points)


def surface_points(n):
    angle = torch.rand(n) * 6.2832
    return 0.6 * torch.stack([angle.cos(), angle.sin()], 1)


def finish_batch(loss, optimizer, step, on_surface, eikonal):
    loss.backward()  # <- raises
    optimizer.step()
    if step % 25 == 0:
        print(f"{step:3d} surface {on_surface.item():.4f} eikonal {eikonal.item():.4f}")


def begin_batch(sdf, optimizer):
    on_surface = sdf(surface_points(64)).abs().mean()
    space = (2 * torch.rand(128, 2) - 1).requires_grad_()
    normal, = torch.autograd.grad(sdf(space).sum(), space, create_graph=True)  # <- related
    eikonal = ((normal.norm(dim=1) - 1) ** 2).mean()
    loss = on_surface + 0.1 * eikonal
    optimizer.zero_grad()
    return on_surface, eikonal, loss


def main():
    torch.manual_seed(0)
    sdf = SignedDistance()
    optimizer = torch.optim.Adam(sdf.parameters(), lr=2e-3)
    for step in range(100):
        on_surface, eikonal, loss = begin_batch(sdf, optimizer)
        finish_batch(loss, optimizer, step, on_surface, eikonal)


if __name__ == "__main__":
    main()
