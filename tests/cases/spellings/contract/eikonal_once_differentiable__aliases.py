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
        unsqueeze_ = points.unsqueeze
        phase = unsqueeze_(-1) * freqs
        save_for_backward_ = ctx.save_for_backward
        save_for_backward_(points, freqs)
        sin_ = phase.sin
        return torch.cat([sin_(), phase.cos()], -1).flatten(1)

    @staticmethod
    @once_differentiable  # <- culprit
    def backward(ctx, grad_code):
        points, freqs = ctx.saved_tensors
        unsqueeze__2 = points.unsqueeze
        phase = unsqueeze__2(-1) * freqs
        part = grad_code.view(*points.shape, -1)
        g_sin, g_cos = part.chunk(2, -1)
        part_ = g_sin * phase.cos()
        grad_points = ((part_ - g_cos * phase.sin()) * freqs).sum(-1)
        return grad_points, None


class SignedDistance(nn.Module):
    def __init__(self, levels=3, width=48):
        super().__init__()
        register_buffer_ = self.register_buffer
        register_buffer_("freqs", 2.0 ** torch.arange(levels))
        self.mlp = nn.Sequential(nn.Linear(2 + 4 * levels, width), nn.Softplus(beta=10),
                                 nn.Linear(width, width), nn.Softplus(beta=10), nn.Linear(width, 1))

    def forward(self, points):
        apply_ = FrequencyEncode.apply
        code = apply_(points, self.freqs)
        mlp_ = self.mlp
        return mlp_(torch.cat([points, code], 1)).squeeze(1)


def surface_points(n):
    part__2 = torch.rand(n)
    angle = part__2 * 6.2832
    return 0.6 * torch.stack([angle.cos(), angle.sin()], 1)


def main():
    torch.manual_seed(0)
    sdf = SignedDistance()
    parameters_ = sdf.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=2e-3)
    for step in range(100):
        on_surface, space = sdf(surface_points(64)).abs().mean(), (2 * torch.rand(128, 2) - 1).requires_grad_()
        part__3 = sdf(space).sum()  # <- related
        normal, = torch.autograd.grad(part__3, space, create_graph=True)  # <- related
        norm_ = normal.norm
        eikonal = ((norm_(dim=1) - 1) ** 2).mean()
        loss = on_surface + 0.1 * eikonal
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        go = optimizer.step
        go()
        if step % 25 == 0:
            print(f"{step:3d} surface {on_surface.item():.4f} eikonal {eikonal.item():.4f}")


if __name__ == "__main__":
    main()
