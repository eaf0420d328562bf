# /// case
# title = "Full backward hooks for gradient logging meet an in-place residual addition"
# source = "https://github.com/shap/shap/issues/3565"
# outcome = "raises"
# torch_error = "is a view and is being modified inplace. This view was created inside a custom Function"
# cause = "hook-contract"
# names = ["conv2", "out", "register_full_backward_hook"]
# fix = "add the shortcut out of place"
# ///
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
        source = iter(model.named_modules())
        while (item_2 := next(source, None)) is not None:
            name, module = item_2
            if isinstance(module, nn.Conv2d):
                module.register_full_backward_hook(self.make_hook(name))  # <- related

    def make_hook(self, name):
        def hook(module, grad_input, grad_output):
            self.norms[name] = grad_output[0].norm().item()
        return hook


def blobs(n, size=12):
    label = torch.randint(0, 4, (n,))
    img = 0.1 * torch.randn(n, 1, size, size)
    source_2 = iter(enumerate(label.tolist()))
    while (item_3 := next(source_2, None)) is not None:
        k, quadrant = item_3
        r, c = divmod(quadrant, 2)
        img[k, 0, r * 6:r * 6 + 6, c * 6:c * 6 + 6] += 0.5 * (quadrant + 1)
    return img, label


torch.manual_seed(0)
net = TinyResNet()
logger = GradientLogger(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
source_3 = iter(range(40))
while (item_4 := next(source_3, None)) is not None:
    step = item_4
    img, label = blobs(32)
    loss = F.cross_entropy(net(img), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item(), {k: round(v, 4) for k, v in logger.norms.items()})
