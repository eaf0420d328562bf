# /// case
# title = "Dice loss thresholds the predicted mask first"
# source = "https://github.com/qubvel-org/segmentation_models.pytorch/pull/611"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "non-differentiable-op"
# names = ["predicted", "threshold", "binarize"]
# fix = "use the probabilities in the loss, threshold only in metrics"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


def binarize(x, threshold):
    if threshold is not None:
        return (x > threshold).type(x.dtype)  # <- culprit
    return x


def dice_score(predicted, mask, threshold=None, smooth=1.0):
    predicted = binarize(predicted, threshold)
    overlap = (predicted * mask).flatten(1).sum(1)
    size = predicted.flatten(1).sum(1) + mask.flatten(1).sum(1)
    return ((2 * overlap + smooth) / (size + smooth)).mean()


def dice_loss_forward(owner, logits, mask):
    return 1 - dice_score(torch.sigmoid(logits), mask, threshold=owner.threshold)  # <- related


class DiceLoss(nn.Module):
    def __init__(self, threshold=0.5):
        super().__init__()
        self.threshold = threshold

    def forward(self, logits, mask):
        return dice_loss_forward(self, logits, mask)


def nucleus_net_forward(owner, x):
    return owner.head(owner.stem(x))


class NucleusNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        return nucleus_net_forward(self, x)


def sample(n=8, size=24):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    center = torch.randint(6, size - 6, (n, 2, 1, 1))
    mask = ((yy - center[:, 0]) ** 2 + (xx - center[:, 1]) ** 2 < 16).float()[:, None]
    return mask + 0.4 * torch.randn_like(mask), mask


def finish_batch(loss, optimizer, it, logits, mask):
    loss.backward()  # <- raises
    optimizer.step()
    if it % 20 == 0:
        dice = dice_score(torch.sigmoid(logits.detach()), mask, threshold=0.5)
        print(f"iter {it} dice {dice.item():.3f} loss {loss.item():.4f}")


def begin_batch(model, criterion, optimizer):
    image, mask = sample()
    logits = model(image)
    loss = criterion(logits, mask)
    optimizer.zero_grad()
    return mask, logits, loss


def main():
    model, criterion = NucleusNet(), DiceLoss(threshold=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for it in range(80):
        mask, logits, loss = begin_batch(model, criterion, optimizer)
        finish_batch(loss, optimizer, it, logits, mask)


main()
