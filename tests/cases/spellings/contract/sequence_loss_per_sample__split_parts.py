import torch
from torch import nn
import torch.nn.functional as F

VOCAB, MAX_LEN = 12, 7


class WordRecogniser(nn.Module):
    """Reads a word image (here: a feature vector) and emits one distribution per character slot."""

    def __init__(self, in_dim=24, hidden=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU())
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.classifier = nn.Linear(hidden, VOCAB)

    def forward(self, images):
        feats = self.backbone(images)
        out, _ = self.decoder(feats.unsqueeze(1).expand(-1, MAX_LEN, -1))
        return self.classifier(out)

    def compute_loss(self, logits, chars, seq_len, sample_weight):
        ce = F.cross_entropy(logits.permute(0, 2, 1), chars, reduction="none")  # <- related
        pad = torch.arange(MAX_LEN)[None, :] >= seq_len[:, None]
        ce = ce.masked_fill(pad, 0.0)
        seq_loss = ce.sum(1) / seq_len.float()
        return seq_loss * sample_weight  # <- culprit


def make_batch(n=32):
    chars = torch.randint(0, VOCAB, (n, MAX_LEN))
    images = F.one_hot(chars[:, :2], VOCAB).float().flatten(1)
    seq_len = torch.randint(2, MAX_LEN + 1, (n,))
    chars[:, 2:] = (chars[:, :1] + torch.arange(2, MAX_LEN)) % VOCAB
    return images, chars, seq_len, 0.5 + torch.rand(n)
