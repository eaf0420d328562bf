import torch as th
from torch import nn
from torch.nn import Conv2d, Linear, Module
from torch.nn import functional as fun


class BasicBlock(Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = Conv2d(channels, channels, 3, padding=1)
        self.conv2 = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        out = self.conv1(x).relu()
        out = self.conv2(out)
        out = out + x
        return out.relu()


class TinyResNet(Module):
    def __init__(self, channels=8, classes=4):
        super().__init__()
        self.stem = Conv2d(1, channels, 3, padding=1)
        self.layer1 = BasicBlock(channels)
        self.layer2 = BasicBlock(channels)
        self.fc = Linear(in_features=channels, out_features=classes)

    def forward(self, img):
        h = self.layer2(self.layer1(self.stem(img).relu()))
        return self.fc(th.mean(h, (2, 3)))


class GradientLogger:
    """Records the norm of the gradient that arrives at every convolution."""

    def __init__(self, model):
        self.norms = {}
        for name, module in model.named_modules():
            if isinstance(module, Conv2d):
                module.register_full_backward_hook(self.make_hook(name))

    def make_hook(self, name):
        def hook(module, grad_input, grad_output):
            self.norms[name] = th.norm(grad_output[0]).item()
        return hook


def blobs(n, size=12):
    label = th.randint(0, 4, (n,))
    img = 0.1 * th.randn(n, 1, size, size)
    for k, quadrant in enumerate(label.tolist()):
        r, c = divmod(quadrant, 2)
        img[k, 0, r * 6:r * 6 + 6, c * 6:c * 6 + 6] += 0.5 * (quadrant + 1)
    return img, label


th.manual_seed(0)
net = TinyResNet()
logger = GradientLogger(net)
optimizer = th.optim.SGD(net.parameters(), 0.05, momentum=0.9)
for step in range(40):
    img, label = blobs(32)
    loss = fun.cross_entropy(net(img), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item(), {k: round(v, 4) for k, v in logger.norms.items()})
