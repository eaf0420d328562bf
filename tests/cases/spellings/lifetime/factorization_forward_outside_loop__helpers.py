# /// case
# title = "Forward pass of a notebook-style matrix factorisation stands above the training loop"
# source = "https://github.com/karpathy/nn-zero-to-hero/issues/31"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-same-root"
# names = ["loss", "predicted"]
# fix = "move the forward pass into the loop"
# ///
import torch

torch.manual_seed(0)

# ---- data: ratings of 30 films by 60 people, a third of them known
taste = torch.randn(60, 4)
genre = torch.randn(30, 4)
ratings = taste @ genre.t() + 0.1 * torch.randn(60, 30)
known = torch.rand(60, 30) < 0.33

# ---- parameters
rank = 6
people = torch.randn(60, rank).mul(0.3).requires_grad_()
films = torch.randn(30, rank).mul(0.3).requires_grad_()
bias = torch.zeros(30, requires_grad=True)
optimizer = torch.optim.Adam([people, films, bias], lr=0.05)

# ---- model
predicted = people @ films.t() + bias  # <- culprit
error = (predicted - ratings)[known]
shrinkage = people.square().mean() + films.square().mean()
loss = error.square().mean() + 0.05 * shrinkage  # <- culprit


def finish_batch(loss, optimizer, epoch):
    loss.backward()  # <- raises
    optimizer.step()
    if epoch % 20 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")


def begin_batch(optimizer):
    optimizer.zero_grad()

# ---- training
for epoch in range(100):
    begin_batch(optimizer)
    finish_batch(loss, optimizer, epoch)

with torch.no_grad():
    held_out = (people @ films.t() + bias - ratings)[~known].square().mean()
print(f"held out {held_out.item():.4f}")
