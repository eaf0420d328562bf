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

text = "the quick brown fox jumps over the lazy dog and runs away from the old farm " * 30
vocab = sorted(set(text))
stoi = {c: i for i, c in enumerate(vocab)}
batch_size, bptt, hidden_size = 8, 20, 48


class CharLM(nn.Module):
    def __init__(self, n_vocab, emb=24):
        super().__init__()
        self.embed = nn.Embedding(n_vocab, emb)
        self.lstm = nn.LSTM(emb, hidden_size, batch_first=True)
        self.decoder = nn.Linear(hidden_size, n_vocab)

    def forward(self, tokens, state):
        out, state = self.lstm(self.embed(tokens), state)
        return self.decoder(out), state


def batchify(ids):
    n = ids.numel() // batch_size
    return ids[: n * batch_size].view(batch_size, n)


def train():
    made = []
    for c in text:
        made.append(stoi[c])
    data = batchify(torch.tensor(made))
    model = CharLM(len(vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    source_2 = iter(range(4))
    while (item_3 := next(source_2, None)) is not None:
        epoch = item_3
        state = (torch.zeros(1, batch_size, hidden_size), torch.zeros(1, batch_size, hidden_size))
        # consecutive windows, so the state keeps the context of the text before
        source = iter(range(0, data.size(1) - bptt - 1, bptt))
        while (item_2 := next(source, None)) is not None:
            start = item_2
            tokens = data[:, start:start + bptt]
            targets = data[:, start + 1:start + bptt + 1]
            logits, state = model(tokens, state)  # <- culprit
            loss = criterion(logits.reshape(-1, len(vocab)), targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()  # <- raises
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
