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


def digit_net_forward(owner, x):
    return owner.fc(F.max_pool2d(F.relu(owner.conv(x)), 2).flatten(1))


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3, padding=1)
        self.fc = nn.Linear(10 * 16, 4)

    def forward(self, x):
        return digit_net_forward(self, x)


def fgsm(model, images, labels, epsilon=0.05):
    images = images.clone().requires_grad_(True)
    clean = images
    images = (images - MEAN) / STD  # <- culprit
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    step = epsilon * images.grad.sign()  # <- raises
    return (clean + step).clamp(0, 1).detach()


def digits(n=48):
    labels = torch.randint(0, 4, (n,))
    images = 0.3 * torch.rand(n, 1, 8, 8)
    for i, k in enumerate(labels.tolist()):
        images[i, 0, (k // 2) * 4:(k // 2) * 4 + 4, (k % 2) * 4:(k % 2) * 4 + 4] += 0.4
    return images, labels


model = DigitNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def finish_batch(loss, optimizer, step):
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")


def begin_batch(model, MEAN, STD, optimizer):
    images, labels = digits()
    adversarial = fgsm(model, images, labels)
    batch = torch.cat([images, adversarial])
    loss = F.cross_entropy(model((batch - MEAN) / STD), labels.repeat(2))
    optimizer.zero_grad()
    return loss
for step in range(80):
    loss = begin_batch(model, MEAN, STD, optimizer)
    finish_batch(loss, optimizer, step)
