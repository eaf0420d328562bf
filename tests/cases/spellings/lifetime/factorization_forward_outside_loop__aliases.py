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
taste, genre = torch.randn(60, 4), torch.randn(30, 4)
part_ = taste @ genre.t()
ratings = part_ + 0.1 * torch.randn(60, 30)
known, rank = torch.rand(60, 30) < 0.33, 6
part__2 = torch.randn(60, rank).mul(0.3)
people = part__2.requires_grad_()
films, bias = torch.randn(30, rank).mul(0.3).requires_grad_(), torch.zeros(30, requires_grad=True)
optimizer = torch.optim.Adam([people, films, bias], lr=0.05)

# ---- model
error = ((predicted := people @ films.t() + bias) - ratings)[known]  # <- culprit
part__3 = people.square().mean()
shrinkage = part__3 + films.square().mean()
square_ = error.square  # <- culprit
loss = square_().mean() + 0.05 * shrinkage  # <- culprit

# ---- training
for epoch in range(100):
    clear = optimizer.zero_grad
    clear()
    differentiate = loss.backward  # <- raises
    differentiate()  # <- raises
    go = optimizer.step
    go()
    if epoch % 20 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")

with torch.no_grad():
    part = (people @ films.t() + bias - ratings)[~known].square()
    held_out = part.mean()
print(f"held out {held_out.item():.4f}")
