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


class Binarizer(nn.Module):
    def __init__(self, channels, bits):
        super().__init__()
        self.conv = nn.Conv2d(channels, bits, kernel_size=1, bias=False)

    def forward(self, feats):
        return StochasticSign.apply(torch.tanh(self.conv(feats)), self.training)


class PatchCodec(nn.Module):
    def __init__(self, bits=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU())
        self.binarizer = Binarizer(16, bits)
        self.decoder = nn.Sequential(nn.Conv2d(bits, 32, 1), nn.ReLU(),
                                     nn.Conv2d(32, 3 * 16, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, patch):
        return self.decoder(self.binarizer(self.encoder(patch)))


def patches(n):
    colour = torch.rand(n, 3, 1, 1)
    ramp = torch.linspace(-0.3, 0.3, 16).view(1, 1, 1, 16) * torch.randn(n, 1, 1, 1)
    return (colour + ramp).expand(n, 3, 16, 16).clamp(0, 1)
