# /// case
# title = "Stateful char LM feeds the LSTM state of the last window into the next one"
# source = "https://github.com/MorvanZhou/PyTorch-Tutorial/issues/57"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-carried-state"
# names = ["state"]
# fix = "detach both tensors of the state before each window"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)

vocab = sorted(set((text := "the quick brown fox jumps over the lazy dog and runs away from the old farm " * 30)))
stoi = {c: i for i, c in enumerate(vocab)}
batch_size, bptt, hidden_size = 8, 20, 48


class CharLM(nn.Module):
    def __init__(self, n_vocab, emb=24):
        super().__init__()
        self.embed = nn.Embedding(n_vocab, emb)
        self.lstm = nn.LSTM(emb, hidden_size, batch_first=True)
        self.decoder = nn.Linear(hidden_size, n_vocab)

    def forward(self, tokens, state):
        embed_ = self.embed
        out, state = self.lstm(embed_(tokens), state)
        part = self.decoder(out)
        return part, state


def batchify(ids):
    numel_ = ids.numel
    n = numel_() // batch_size
    return ids[: n * batch_size].view(batch_size, n)


def train():
    part__2 = torch.tensor([stoi[c] for c in text])
    data = batchify(part__2)
    part__3 = len(vocab)
    model = CharLM(part__3)
    part__4 = model.parameters()
    optimizer = torch.optim.Adam(part__4, lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(4):
        part_ = torch.zeros(1, batch_size, hidden_size)
        state = (part_, torch.zeros(1, batch_size, hidden_size))
        # consecutive windows, so the state keeps the context of the text before
        for start in range(0, data.size(1) - bptt - 1, bptt):
            tokens, targets = data[:, start:start + bptt], data[:, start + 1:start + bptt + 1]
            logits, state = model(tokens, state)  # <- culprit
            reshape_ = logits.reshape
            loss = criterion(reshape_(-1, len(vocab)), targets.reshape(-1))
            clear = optimizer.zero_grad
            clear()
            differentiate = loss.backward  # <- raises
            differentiate()  # <- raises
            go = optimizer.step
            go()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
