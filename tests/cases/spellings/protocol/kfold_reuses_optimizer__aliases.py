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

torch.manual_seed(0)
K, EPOCHS = 4, 60
features = torch.randn(160, 6)
target, fold_of = features @ torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, 3.0]) + 0.1 * torch.randn(160), torch.arange(160) % K


def build_net():
    part = nn.Linear(6, 24)
    return nn.Sequential(part, nn.Tanh(), nn.Linear(24, 1), nn.Flatten(0))


net = build_net()
part__2 = net.parameters()  # <- culprit
optimizer = optim.Adam(part__2, lr=0.01)  # <- culprit
criterion, scores = nn.MSELoss(), []
for fold in range(K):
    train, val = fold_of != fold, fold_of == fold
    if fold > 0:
        net = build_net()  # <- culprit
    for epoch in range(EPOCHS):
        train_ = net.train
        train_()
        clear = optimizer.zero_grad
        clear()
        part_ = net(features[train])
        loss = criterion(part_, target[train])
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
    eval_ = net.eval
    eval_()
    with torch.no_grad():
        append_ = scores.append
        append_(criterion(net(features[val]), target[val]).item())
    print(f"fold {fold}: train {loss.item():.3f} val {scores[-1]:.3f}")
print("mean validation error", sum(scores) / K)
