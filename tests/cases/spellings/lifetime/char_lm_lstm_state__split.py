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

from char_lm_lstm_state__split_parts import CharLM, batch_size, batchify, bptt, hidden_size

torch.manual_seed(0)

text = "the quick brown fox jumps over the lazy dog and runs away from the old farm " * 30
vocab = sorted(set(text))
stoi = {c: i for i, c in enumerate(vocab)}


def train():
    data = batchify(torch.tensor([stoi[c] for c in text]))
    model = CharLM(len(vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(4):
        state = (torch.zeros(1, batch_size, hidden_size), torch.zeros(1, batch_size, hidden_size))
        # consecutive windows, so the state keeps the context of the text before
        for start in range(0, data.size(1) - bptt - 1, bptt):
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
