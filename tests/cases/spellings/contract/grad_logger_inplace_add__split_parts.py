import torch
from torch import nn
import torch.nn.functional as F


class BasicBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        out = F.relu(self.conv1(x))
        out = self.conv2(out)
        out += x  # <- culprit # <- raises
        return F.relu(out)


class TinyResNet(nn.Module):
    def __init__(self, channels=8, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.layer1 = BasicBlock(channels)
        self.layer2 = BasicBlock(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, img):
        h = self.layer2(self.layer1(F.relu(self.stem(img))))
        return self.fc(h.mean((2, 3)))


class GradientLogger:
    """Records the norm of the gradient that arrives at every convolution."""

    def __init__(self, model):
        self.norms = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                module.register_full_backward_hook(self.make_hook(name))  # <- related

    def make_hook(self, name):
        def hook(module, grad_input, grad_output):
            self.norms[name] = grad_output[0].norm().item()
        return hook


def blobs(n, size=12):
    label = torch.randint(0, 4, (n,))
    img = 0.1 * torch.randn(n, 1, size, size)
    for k, quadrant in enumerate(label.tolist()):
        r, c = divmod(quadrant, 2)
        img[k, 0, r * 6:r * 6 + 6, c * 6:c * 6 + 6] += 0.5 * (quadrant + 1)
    return img, label
