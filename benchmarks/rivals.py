"""PyTorch models that our models are compared with, written from the papers.

`TransJect` is written as a user would write it: a module for every part, and
the default of `torch.nn.utils.parametrizations.orthogonal` for every matrix.
`FastTransJect` has our algebraic optimisations: Cayley maps, the folded matrix
U diag(Sigma) V, and all experts in one product. `Transformer` is
`torch.nn.TransformerEncoder`, whose attention is
`scaled_dot_product_attention`. Every model maps ids [b, n] to logits [b, 2] and
an auxiliary loss. The encoders of other mixers are in `benchmarks.twins`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from benchmarks import ours
from benchmarks.ours import CLASSES, VOCABULARY
from benchmarks.timing import Call, threads


def sinusoids(length: int, d: int) -> Tensor:
  """Returns sinusoidal positions [length, d]."""
  rates = torch.exp(torch.arange(0, d, 2) * (-math.log(10_000.0) / d))
  angles = torch.arange(length)[:, None] * rates[None]
  # Sines and cosines alternate: [length, d / 2, 2] -> [length, d].
  return torch.stack([angles.sin(), angles.cos()], -1).reshape(length, d)


def rotation(d: int) -> nn.Module:
  """Returns a linear layer with an orthogonal matrix."""
  return parametrizations.orthogonal(nn.Linear(d, d, bias=False))


def draw_free_matrices(model: nn.Module) -> None:
  """Draws the free matrices of `rotation` from our initial distribution.

  PyTorch initialises them to zero, where its exponential is cheapest. They grow
  in training, and the number of squarings grows with their norm.
  """
  for module in model.modules():
    if parametrize.is_parametrized(module, "weight"):
      free = module.parametrizations.weight.original
      nn.init.normal_(free, std=1.5 / free.shape[-1] ** 0.5)


class Embedding(nn.Module):
  """Concatenated embeddings of tokens and positions, [b, n] -> [b, n, d]."""

  def __init__(self, length: int, d: int) -> None:
    super().__init__()
    self.tokens = nn.Embedding(VOCABULARY, d // 2)
    self.register_buffer("positions", sinusoids(length, d // 2))

  def forward(self, ids: Tensor) -> Tensor:
    """Embeds ids [b, n]."""
    positions = self.positions.expand(len(ids), -1, -1)
    return torch.cat([self.tokens(ids), positions], -1)


class Expert(nn.Module):
  """Expert of TransJect, ELU(x U diag(sigma) V)."""

  def __init__(self, d: int) -> None:
    super().__init__()
    self.u, self.v = rotation(d), rotation(d)

  def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
    """Maps x [b, n, d] with sigma [b, 1, d] -> [b, n, d]."""
    return F.elu(self.v(self.u(x) * sigma))


class Layer(nn.Module):
  """Layer of TransJect (equations 4 to 8)."""

  def __init__(self, d: int, experts: int, layers: int) -> None:
    super().__init__()
    self.layers = layers
    self.alpha = nn.Parameter(torch.tensor(0.5))
    self.experts = nn.ModuleList(Expert(d) for _ in range(experts))
    self.gate = nn.Linear(d, 1)
    self.first, self.second = rotation(d), rotation(d)
    self.bias = nn.Parameter(torch.zeros(2, d))

  def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
    """Maps x [b, n, d] with sigma [b, 1, d] -> [b, n, d]."""
    a = self.alpha.tanh() / self.layers
    # Weigh the experts by a gate on their outputs, which are max-pooled.
    outputs = [expert(x, sigma) for expert in self.experts]
    pooled = torch.stack([(x + a * y).amax(1) for y in outputs], 1)
    weights = self.gate(pooled).softmax(1)
    x = x + a * sum(weights[:, e, None] * y for e, y in enumerate(outputs))
    # Apply the feed-forward part.
    y = F.elu(self.first(x) + self.bias[0])
    return x + a * F.elu(self.second(y) + self.bias[1])


def eigenvalues(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
  """Returns Sigma [b, 1, d] and the reconstruction error.

  Args:
    x: embedded tokens [b, n, d].
    basis: orthogonal matrix of approximate eigenvectors [d, d].
  """
  # Gram matrix of each row [b, d, d], and its eigenvalues in the basis [b, d].
  gram = x.mT @ x / x.shape[1]
  values = torch.diagonal(basis.T @ gram @ basis, dim1=-2, dim2=-1)
  sigma = values / values.amax(1, keepdim=True)
  # Error: squared distance of the Gram matrix to Q diag(values) Q^T.
  rebuilt = (basis * values[:, None]) @ basis.T
  return sigma[:, None], (gram.detach() - rebuilt).square().sum((1, 2)).mean()


class TransJect(nn.Module):
  """TransJect as a user writes it. `learned` selects Random-TransJect."""

  def __init__(
    self, length: int, d: int, experts: int, layers: int, learned: bool
  ) -> None:
    super().__init__()
    self.embedding = Embedding(length, d)
    self.stack = nn.ModuleList(Layer(d, experts, layers) for _ in range(layers))
    self.sigma = nn.Parameter(torch.rand(d)) if learned else None
    self.basis = None if learned else rotation(d)
    self.head = nn.Linear(d, CLASSES)

  def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and the auxiliary loss."""
    x = self.embedding(ids)
    error = torch.zeros(())
    if self.sigma is None:
      # Compute Sigma from the tokens; all layers share it.
      sigma, error = eigenvalues(x, self.basis.weight)
    else:
      sigma = (self.sigma / self.sigma.abs().max())[None, None]
    for layer in self.stack:
      x = layer(x, sigma)
    return self.head(x.mean(1)), error


def cayley(a: Tensor) -> Tensor:
  """Returns the rotations 2 (I - S)^-1 - I, with S = (A - A^T) / 2.

  The matrices are inverted one by one, because PyTorch's batched inverse fails
  on CPUs at d = 512.

  Args:
    a: free matrices A, [k, d, d].
  """
  eye = torch.eye(a.shape[-1])
  inverses = [torch.linalg.inv(eye - (free - free.T) / 2) for free in a]
  return 2 * torch.stack(inverses) - eye


class FastTransJect(nn.Module):
  """TransJect with our algebraic optimisations, which keep the logits."""

  def __init__(
    self, length: int, d: int, experts: int, layers: int, learned: bool
  ) -> None:
    super().__init__()
    self.experts, self.layers = experts, layers
    self.embedding = Embedding(length, d)
    # Matrices of each layer: U of all experts, V of all experts, and two of the
    # feed-forward part. The last matrix is the basis of the eigenvalues.
    count = layers * (2 * experts + 2) + 1
    self.skew = nn.Parameter(torch.randn(count, d, d) / d**0.5)
    self.alpha = nn.Parameter(torch.full((layers,), 0.5))
    self.gate = nn.Parameter(torch.randn(layers, d) / d**0.5)
    self.bias = nn.Parameter(torch.zeros(layers, 2, d))
    self.sigma = nn.Parameter(torch.rand(d)) if learned else None
    self.head = nn.Linear(d, CLASSES)
    self.kept: Tensor | None = None

  def rotations(self) -> Tensor:
    """Computes all orthogonal matrices, or returns the precomputed ones."""
    return cayley(self.skew) if self.kept is None else self.kept

  def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and the auxiliary loss."""
    x = self.embedding(ids)
    b, n, d = x.shape
    q = self.rotations()
    error = torch.zeros(())
    # Eigenvalues are the mean squares of the columns of x Q. The error is the
    # squared norm of the Gram matrix minus the squared norm of its diagonal in
    # the basis Q.
    if self.sigma is None:
      fixed = x.detach()
      values = (x @ q[-1]).square().mean(1)
      sigma = values / values.amax(1, keepdim=True)
      gram = fixed.mT @ fixed / n
      diagonal = (fixed @ q[-1]).square().mean(1)
      error = (gram.square().sum((1, 2)) - diagonal.square().sum(1)).mean()
    else:
      sigma = (self.sigma / self.sigma.abs().max())[None]
    e = self.experts
    stacks = q.split(2 * e + 2)
    for layer in range(self.layers):
      # Matrices of the layer: u and v [e, d, d], w [2, d, d].
      u, v, w = stacks[layer].split((e, e, 2))
      a = self.alpha[layer].tanh() / self.layers
      # Apply all experts at once. With many tokens, fold U diag(Sigma) V first.
      if n > d:
        folded = (u[None] * sigma[:, None, None]) @ v  # [b or 1, e, d, d]
        sides = folded.permute(0, 2, 1, 3).reshape(-1, d, e * d)
        # A learned Sigma is equal for all rows: one large product suffices.
        y = x @ sides if len(sides) > 1 else x @ sides[0]
        f = F.elu(y).reshape(b, n, e, d)
      else:
        y = torch.einsum("bni,eij->benj", x, u) * sigma[:, None, None]
        f = F.elu(y @ v).transpose(1, 2)
      # Weigh the experts by a gate on their outputs, which are max-pooled.
      # Shapes: f [b, n, e, d], pooled [b, e, d], weights [b, e].
      pooled = (x[:, :, None] + a * f).amax(1)
      weights = (pooled @ self.gate[layer]).softmax(1)
      x = x + a * (weights[:, None, None] @ f)[:, :, 0]
      # Apply the feed-forward part.
      y = F.elu(x @ w[0] + self.bias[layer, 0])
      x = x + a * F.elu(y @ w[1] + self.bias[layer, 1])
    return self.head(x.mean(1)), error


class Transformer(nn.Module):
  """`torch.nn.TransformerEncoder` with pre-normalisation (norm_first=True).

  The constructor turns off PyTorch's fast path, which is slower on CPUs and
  does not use `scaled_dot_product_attention`.
  """

  def __init__(
    self, length: int, d: int, layers: int, heads: int, mlp_dim: int
  ) -> None:
    super().__init__()
    torch.backends.mha.set_fastpath_enabled(False)
    self.embedding = Embedding(length, d)
    layout = {"batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(
      d, heads, mlp_dim, dropout=0.0, activation="gelu", **layout
    )
    self.encoder = nn.TransformerEncoder(
      layer, layers, enable_nested_tensor=False
    )
    self.head = nn.Linear(d, CLASSES)

  def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits, and zero for the auxiliary loss."""
    x = self.encoder(self.embedding(ids))
    return self.head(x.mean(1)), torch.zeros(())


def make(name: str, length: int, *, training: bool) -> dict[str, nn.Module]:
  """Builds the PyTorch models for one of our models, by title in the tables.

  Args:
    name: name of our model.
    length: number of tokens.
    training: True to add a model with PyTorch's initial matrices.
  """
  torch.manual_seed(0)
  is_learned = name == "random_transject"
  sizes = (length, ours.D, ours.EXPERTS, ours.LAYERS, is_learned)
  models = {"user": TransJect(*sizes), "our algebra": FastTransJect(*sizes)}
  # The model "first steps" keeps PyTorch's zero initialisation.
  if training:
    models["first steps"] = TransJect(*sizes)
  draw_free_matrices(models["user"])
  return models


def draw_inputs(batch: int, length: int) -> Tensor:
  """Returns random ids [batch, length], on PyTorch's default device."""
  ids = torch.from_numpy(ours.random_ids(batch, length)).long()
  return ids.to(torch.get_default_device())


def wait() -> None:
  """Waits until PyTorch's default device has finished its work."""
  if torch.get_default_device().type == "cuda":
    torch.cuda.synchronize()


def train(model: nn.Module, batch: int, length: int) -> Call:
  """Returns a call that trains for one step: forward, backward, Adam."""
  torch.set_num_threads(threads())
  inputs = draw_inputs(batch, length)
  targets = torch.zeros(batch, dtype=torch.long)
  optimizer = torch.optim.Adam(model.parameters(), lr=ours.LEARNING_RATE)

  def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    logits, error = model(inputs)
    (F.cross_entropy(logits, targets) + 1e-3 * error).backward()
    optimizer.step()
    wait()

  return step


def infer(model: nn.Module, batch: int, length: int) -> Call:
  """Returns a call of the forward pass with precomputed orthogonal matrices.

  The model cannot be trained afterwards, because this function removes its
  parametrisations.
  """
  torch.set_num_threads(threads())
  inputs = draw_inputs(batch, length)
  model.eval()
  # Compute every orthogonal matrix once, and store it.
  with torch.no_grad():
    for module in model.modules():
      if parametrize.is_parametrized(module, "weight"):
        parametrize.remove_parametrizations(module, "weight")
    if hasattr(model, "rotations"):
      model.kept = model.rotations()

  def forward() -> None:
    with torch.inference_mode():
      model(inputs)
    wait()

  return forward
