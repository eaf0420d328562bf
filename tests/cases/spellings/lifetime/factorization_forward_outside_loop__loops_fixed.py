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

# ---- training
source = iter(range(100))
while (item_2 := next(source, None)) is not None:
    epoch = item_2
    predicted = people @ films.t() + bias
    error = (predicted - ratings)[known]
    shrinkage = people.square().mean() + films.square().mean()
    loss = error.square().mean() + 0.05 * shrinkage
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 20 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")

with torch.no_grad():
    held_out = (people @ films.t() + bias - ratings)[~known].square().mean()
print(f"held out {held_out.item():.4f}")
