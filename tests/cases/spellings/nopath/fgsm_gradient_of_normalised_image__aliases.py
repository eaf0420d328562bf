# /// case
# title = "FGSM reads .grad from the image after it was rebound to its normalised version"
# source = "https://github.com/BorealisAI/advertorch/issues/49"
# outcome = "raises"
# torch_error = "'NoneType' object has no attribute 'sign'"
# cause = "not-a-leaf-grad"
# names = ["images"]
# fix = "keep the leaf and normalise into another variable"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
MEAN, STD = 0.4, 0.25


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3, padding=1)
        part = 10 * 16
        self.fc = nn.Linear(part, 4)

    def forward(self, x):
        part_ = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return self.fc(part_)


def fgsm(model, images, labels, epsilon=0.05):
    clone_ = images.clone
    images = clone_().requires_grad_(True)
    clean = images
    images = (images - MEAN) / STD  # <- culprit
    part__2 = model(images)
    loss = F.cross_entropy(part__2, labels)
    differentiate = loss.backward
    differentiate()
    step = epsilon * images.grad.sign()  # <- raises
    part__3 = (clean + step).clamp(0, 1)
    return part__3.detach()


def digits(n=48):
    labels, images = torch.randint(0, 4, (n,)), 0.3 * torch.rand(n, 1, 8, 8)
    for i, k in enumerate(labels.tolist()):
        images[i, 0, (k // 2) * 4:(k // 2) * 4 + 4, (k % 2) * 4:(k % 2) * 4 + 4] += 0.4
    return images, labels


model = DigitNet()
part__5 = model.parameters()
optimizer = torch.optim.Adam(part__5, lr=3e-3)
for step in range(80):
    images, labels = digits()
    adversarial = fgsm(model, images, labels)
    batch = torch.cat([images, adversarial])
    part__4 = model((batch - MEAN) / STD)
    loss = F.cross_entropy(part__4, labels.repeat(2))
    clear = optimizer.zero_grad
    clear()
    differentiate_ = loss.backward
    differentiate_()
    go = optimizer.step
    go()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
