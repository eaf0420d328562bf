# /// case
# title = "Cross validation: every fold makes a new model, but one optimizer is used for all"
# source = "https://github.com/pytorch/pytorch/issues/54765"
# outcome = "silent"
# torch_error = ""
# cause = "optimizer-orphaned-parameters"
# also = ["optimizer-missing-parameters"]
# names = ["optimizer", "net"]
# fix = "create the optimizer inside the fold loop"
# ///
import torch
import torch.nn as nn
import torch.optim as optim

from kfold_reuses_optimizer__split_parts import build_net

torch.manual_seed(0)
K, EPOCHS = 4, 60
features = torch.randn(160, 6)
target = features @ torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, 3.0]) + 0.1 * torch.randn(160)
fold_of = torch.arange(160) % K


net = build_net()
optimizer = optim.Adam(net.parameters(), lr=0.01)  # <- culprit
criterion = nn.MSELoss()

scores = []
for fold in range(K):
    train, val = fold_of != fold, fold_of == fold
    if fold > 0:
        net = build_net()  # <- culprit
    for epoch in range(EPOCHS):
        net.train()
        optimizer.zero_grad()
        loss = criterion(net(features[train]), target[train])
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        scores.append(criterion(net(features[val]), target[val]).item())
    print(f"fold {fold}: train {loss.item():.3f} val {scores[-1]:.3f}")
print("mean validation error", sum(scores) / K)
