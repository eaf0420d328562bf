# /// case
# title = "Hand-written SGD update of parameters outside torch.no_grad()"
# source = "https://github.com/pytorch/examples/pull/779"
# outcome = "raises"
# torch_error = "a leaf Variable that requires grad is being used in an in-place operation"
# cause = "inplace-leaf"
# names = ["p"]
# fix = "do the update under torch.no_grad()"
# ///
import torch
import torch.nn as nn

from manual_sgd_no_guard__split_parts import WordModel, get_batch, repackage_hidden


def train(model, corpus, lr=2.0, bptt=10, clip=0.25, epochs=6):
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        hidden = model.init_hidden(corpus.size(1))
        for i in range(0, corpus.size(0) - 1 - bptt, bptt):
            data, targets = get_batch(corpus, i, bptt)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            # helps with exploding gradients in RNNs
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)  # <- culprit # <- raises
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    start = torch.randint(0, 20, (1, 8))
    corpus = (start + 3 * torch.arange(101).unsqueeze(1)) % 20
    train(WordModel(), corpus)
