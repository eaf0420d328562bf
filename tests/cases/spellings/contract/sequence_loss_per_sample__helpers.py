# /// case
# title = "Word recogniser's loss is a vector with one entry per sequence"
# source = "https://github.com/mindee/doctr/pull/379"
# outcome = "raises"
# torch_error = "grad can be implicitly created only for scalar outputs"
# cause = "non-scalar-root"
# names = ["seq_loss", "loss"]
# fix = "reduce the per-sequence losses with .mean()"
# ///
import torch
from torch import nn
import torch.nn.functional as F

VOCAB, MAX_LEN = 12, 7


def word_recogniser_forward(owner, images):
    feats = owner.backbone(images)
    out, _ = owner.decoder(feats.unsqueeze(1).expand(-1, MAX_LEN, -1))
    return owner.classifier(out)


def word_recogniser_compute_loss(owner, logits, chars, seq_len, sample_weight):
    ce = F.cross_entropy(logits.permute(0, 2, 1), chars, reduction="none")  # <- related
    pad = torch.arange(MAX_LEN)[None, :] >= seq_len[:, None]
    ce = ce.masked_fill(pad, 0.0)
    seq_loss = ce.sum(1) / seq_len.float()
    return seq_loss * sample_weight  # <- culprit


class WordRecogniser(nn.Module):
    """Reads a word image (here: a feature vector) and emits one distribution per character slot."""

    def __init__(self, in_dim=24, hidden=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU())
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.classifier = nn.Linear(hidden, VOCAB)

    def forward(self, images):
        return word_recogniser_forward(self, images)

    def compute_loss(self, logits, chars, seq_len, sample_weight):
        return word_recogniser_compute_loss(self, logits, chars, seq_len, sample_weight)


def make_batch(n=32):
    chars = torch.randint(0, VOCAB, (n, MAX_LEN))
    images = F.one_hot(chars[:, :2], VOCAB).float().flatten(1)
    seq_len = torch.randint(2, MAX_LEN + 1, (n,))
    chars[:, 2:] = (chars[:, :1] + torch.arange(2, MAX_LEN)) % VOCAB
    return images, chars, seq_len, 0.5 + torch.rand(n)


def finish_batch(loss, optimizer, step):
    loss.backward()  # <- raises
    optimizer.step()
    if step % 30 == 0:
        print(step, loss)


def begin_batch(model, optimizer):
    images, chars, seq_len, weight = make_batch()
    logits = model(images)
    loss = model.compute_loss(logits, chars, seq_len, weight)
    optimizer.zero_grad()
    return loss


def main():
    torch.manual_seed(0)
    model = WordRecogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        loss = begin_batch(model, optimizer)
        finish_batch(loss, optimizer, step)


if __name__ == "__main__":
    main()
