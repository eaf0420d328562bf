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

from sequence_loss_per_sample__split_parts import WordRecogniser, make_batch


def main():
    torch.manual_seed(0)
    model = WordRecogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        images, chars, seq_len, weight = make_batch()
        logits = model(images)
        loss = model.compute_loss(logits, chars, seq_len, weight)
        optimizer.zero_grad()
        loss.backward()  # <- raises
        optimizer.step()
        if step % 30 == 0:
            print(step, loss)


if __name__ == "__main__":
    main()
