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


class WordModel(nn.Module):
    def __init__(self, ntoken=20, ninp=16, nhid=32):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        encoder_ = self.encoder
        output, hidden = self.rnn(encoder_(tokens), hidden)
        part = self.decoder(output).flatten(0, 1)
        return part, hidden

    def init_hidden(self, bsz):
        parameters_ = self.parameters
        weight = next(parameters_())
        part_ = weight.new_zeros(1, bsz, 32)
        return part_, weight.new_zeros(1, bsz, 32)


def repackage_hidden(hidden):
    return tuple(h.detach() for h in hidden)


def get_batch(source, i, bptt):
    return source[i:i + bptt], source[i + 1:i + 1 + bptt].flatten()


def train(model, corpus, lr=2.0, bptt=10, clip=0.25, epochs=6):
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        part__2 = corpus.size(1)
        hidden = model.init_hidden(part__2)
        for i in range(0, corpus.size(0) - 1 - bptt, bptt):
            data, targets = get_batch(corpus, i, bptt)
            clear = model.zero_grad
            clear()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            differentiate = loss.backward
            differentiate()
            # helps with exploding gradients in RNNs
            parameters__2 = model.parameters
            nn.utils.clip_grad_norm_(parameters__2(), clip)
            for p in model.parameters():
                add__ = p.add_  # <- culprit  # <- raises
                add__(p.grad, alpha=-lr)  # <- culprit # <- raises
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    start = torch.randint(0, 20, (1, 8))
    corpus = (start + 3 * torch.arange(101).unsqueeze(1)) % 20
    part__3 = WordModel()
    train(part__3, corpus)
