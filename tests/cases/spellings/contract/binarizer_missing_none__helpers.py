# /// case
# title = "Stochastic binariser's backward returns one gradient for two inputs"
# source = "https://github.com/1zb/pytorch-image-comp-rnn/issues/4"
# outcome = "raises"
# torch_error = "returned an incorrect number of gradients (expected 2, got 1)"
# cause = "gradient-count-mismatch"
# names = ["StochasticSign", "backward", "training"]
# fix = "return None for the non-tensor argument"
# ///
import torch
from torch import nn


class StochasticSign(torch.autograd.Function):
    """+1 / -1 code with probability (1 + x) / 2 while training, plain sign otherwise."""

    @staticmethod
    def forward(ctx, x, training):  # <- related
        if training:
            noise = torch.rand_like(x)
            return torch.where((1 + x) / 2 >= noise, 1.0, -1.0)
        return x.sign()

    @staticmethod
    def backward(ctx, grad_code):
        return grad_code  # <- culprit


def binarizer_forward(owner, feats):
    return StochasticSign.apply(torch.tanh(owner.conv(feats)), owner.training)


class Binarizer(nn.Module):
    def __init__(self, channels, bits):
        super().__init__()
        self.conv = nn.Conv2d(channels, bits, kernel_size=1, bias=False)

    def forward(self, feats):
        return binarizer_forward(self, feats)


def patch_codec_forward(owner, patch):
    return owner.decoder(owner.binarizer(owner.encoder(patch)))


class PatchCodec(nn.Module):
    def __init__(self, bits=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU())
        self.binarizer = Binarizer(16, bits)
        self.decoder = nn.Sequential(nn.Conv2d(bits, 32, 1), nn.ReLU(),
                                     nn.Conv2d(32, 3 * 16, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, patch):
        return patch_codec_forward(self, patch)


def patches(n):
    colour = torch.rand(n, 3, 1, 1)
    ramp = torch.linspace(-0.3, 0.3, 16).view(1, 1, 1, 16) * torch.randn(n, 1, 1, 1)
    return (colour + ramp).expand(n, 3, 16, 16).clamp(0, 1)


def finish_batch(residual, solver, step):
    residual.backward()  # <- raises
    solver.step()
    if step % 30 == 0:
        print(f"{step:4d} l1 {residual.item():.4f}")


def begin_batch(codec, solver):
    batch = patches(16)
    residual = (codec(batch) - batch).abs().mean()
    solver.zero_grad()
    return residual


def main():
    torch.manual_seed(0)
    codec = PatchCodec()
    solver = torch.optim.Adam(codec.parameters(), lr=2e-3)
    for step in range(150):
        residual = begin_batch(codec, solver)
        finish_batch(residual, solver, step)


if __name__ == "__main__":
    main()
