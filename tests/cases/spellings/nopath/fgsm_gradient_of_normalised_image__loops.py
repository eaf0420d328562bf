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
        self.fc = nn.Linear(10 * 16, 4)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


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
    source = iter(enumerate(labels.tolist()))
    while (item_2 := next(source, None)) is not None:
        i, k = item_2
        images[i, 0, (k // 2) * 4:(k // 2) * 4 + 4, (k % 2) * 4:(k % 2) * 4 + 4] += 0.4
    return images, labels


model = DigitNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
source_2 = iter(range(80))
while (item_3 := next(source_2, None)) is not None:
    step = item_3
    images, labels = digits()
    adversarial = fgsm(model, images, labels)
    batch = torch.cat([images, adversarial])
    loss = F.cross_entropy(model((batch - MEAN) / STD), labels.repeat(2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
