"""PyTorch models that ours are timed against, written from the papers.

`TransJect` is what a user writes: a module for every part, the default of
`torch.nn.utils.parametrizations.orthogonal` for every matrix. `FastTransJect`
has all of our algebra: Cayley maps, U diag(Sigma) V folded, experts side by
side. `Transformer` is `torch.nn.TransformerEncoder`, whose attention is
`scaled_dot_product_attention`. All take ids [b, n] to logits [b, 2].
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from benchmarks.speed import CLASSES, VOCABULARY


def sinusoids(length: int, d: int) -> torch.Tensor:
  """Positions, [length, d]."""
  rates = torch.exp(torch.arange(0, d, 2) * (-math.log(10_000.0) / d))
  angles = torch.arange(length)[:, None] * rates[None]
  return torch.stack([angles.sin(), angles.cos()], -1).reshape(length, d)


def rotation(d: int) -> nn.Module:
  """A product with an orthogonal matrix."""
  return parametrizations.orthogonal(nn.Linear(d, d, bias=False))


def grown(model: nn.Module) -> None:
  """Gives the free matrices of `rotation` the size that our models start at.

  Theirs start at zero and grow in training, and there PyTorch's exponential is
  cheapest: its number of squarings follows the norm.
  """
  for module in model.modules():
    if parametrize.is_parametrized(module, "weight"):
      free = module.parametrizations.weight.original
      nn.init.normal_(free, std=1.5 / free.shape[-1] ** 0.5)


class Embedding(nn.Module):
  """Tokens beside positions, [b, n] -> [b, n, d]."""

  def __init__(self, length: int, d: int) -> None:
    super().__init__()
    self.tokens = nn.Embedding(VOCABULARY, d // 2)
    self.register_buffer("positions", sinusoids(length, d // 2))

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    """As the class says."""
    positions = self.positions.expand(len(ids), -1, -1)
    return torch.cat([self.tokens(ids), positions], -1)


class Expert(nn.Module):
  """ELU(x U diag(sigma) V)."""

  def __init__(self, d: int) -> None:
    super().__init__()
    self.u, self.v = rotation(d), rotation(d)

  def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """x [b, n, d], sigma [b, 1, d]."""
    return F.elu(self.v(self.u(x) * sigma))


class Layer(nn.Module):
  """TransJect's layer (equations 4 to 8)."""

  def __init__(self, d: int, experts: int, layers: int) -> None:
    super().__init__()
    self.layers = layers
    self.alpha = nn.Parameter(torch.tensor(0.5))
    self.experts = nn.ModuleList(Expert(d) for _ in range(experts))
    self.gate = nn.Linear(d, 1)
    self.first, self.second = rotation(d), rotation(d)
    self.bias = nn.Parameter(torch.zeros(2, d))

  def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """x [b, n, d], sigma [b, 1, d]."""
    a = self.alpha.tanh() / self.layers
    f = [expert(x, sigma) for expert in self.experts]
    pooled = torch.stack([(x + a * one).amax(1) for one in f], 1)
    weights = self.gate(pooled).softmax(1)
    mixed = sum(weights[:, e, None] * one for e, one in enumerate(f))
    x = x + a * mixed
    y = F.elu(self.first(x) + self.bias[0])
    return x + a * F.elu(self.second(y) + self.bias[1])


def eigenvalues(
  x: torch.Tensor, basis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
  """Sigma [b, 1, d] and the reconstruction error."""
  gram = x.mT @ x / x.shape[1]
  values = torch.diagonal(basis.T @ gram @ basis, dim1=-2, dim2=-1)
  sigma = values / values.amax(1, keepdim=True)
  rebuilt = (basis * values[:, None]) @ basis.T
  return sigma[:, None], (gram.detach() - rebuilt).square().sum((1, 2)).mean()


class TransJect(nn.Module):
  """The model as a user writes it; learned: Random-TransJect."""

  def __init__(
    self, length: int, d: int, experts: int, layers: int, learned: bool
  ) -> None:
    super().__init__()
    self.embedding = Embedding(length, d)
    self.stack = nn.ModuleList(Layer(d, experts, layers) for _ in range(layers))
    self.sigma = nn.Parameter(torch.rand(d)) if learned else None
    self.basis = None if learned else rotation(d)
    self.head = nn.Linear(d, CLASSES)

  def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and what else is minimised."""
    x = self.embedding(ids)
    error = torch.zeros(())
    if self.sigma is None:
      sigma, error = eigenvalues(x, self.basis.weight)
    else:
      sigma = (self.sigma / self.sigma.abs().max())[None, None]
    for layer in self.stack:
      x = layer(x, sigma)
    return self.head(x.mean(1)), error


def cayley(a: torch.Tensor) -> torch.Tensor:
  """Rotations of free matrices [k, d, d]: 2 (I - S)^-1 - I.

  One after the other: PyTorch's batched inverse fails on CPUs at d = 512.
  """
  eye = torch.eye(a.shape[-1])
  return torch.stack(
    [2 * torch.linalg.inv(eye - (one - one.T) / 2) - eye for one in a]
  )


class FastTransJect(nn.Module):
  """The same with our algebra."""

  def __init__(
    self, length: int, d: int, experts: int, layers: int, learned: bool
  ) -> None:
    super().__init__()
    self.count, self.layers = experts, layers
    self.embedding = Embedding(length, d)
    matrices = layers * (2 * experts + 2) + 1
    self.skew = nn.Parameter(torch.randn(matrices, d, d) / d**0.5)
    self.alpha = nn.Parameter(torch.full((layers,), 0.5))
    self.gate = nn.Parameter(torch.randn(layers, d) / d**0.5)
    self.bias = nn.Parameter(torch.zeros(layers, 2, d))
    self.sigma = nn.Parameter(torch.rand(d)) if learned else None
    self.head = nn.Linear(d, CLASSES)
    self.kept: torch.Tensor | None = None

  def rotations(self) -> torch.Tensor:
    """All matrices by one call, or those that are kept for inference."""
    return cayley(self.skew) if self.kept is None else self.kept

  def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and what else is minimised."""
    x = self.embedding(ids)
    b, n, d = x.shape
    q = self.rotations()
    error = torch.zeros(())
    if self.sigma is None:
      fixed = x.detach()
      values = (x @ q[-1]).square().mean(1)
      sigma = values / values.amax(1, keepdim=True)
      gram = fixed.mT @ fixed / n
      diagonal = (fixed @ q[-1]).square().mean(1)
      error = (gram.square().sum((1, 2)) - diagonal.square().sum(1)).mean()
    else:
      sigma = (self.sigma / self.sigma.abs().max())[None]
    e, at = self.count, 0
    for layer in range(self.layers):
      u, v = q[at : at + e], q[at + e : at + 2 * e]
      w, at = q[at + 2 * e : at + 2 * e + 2], at + 2 * e + 2
      a = self.alpha[layer].tanh() / self.layers
      if n > d:
        folded = (u[None] * sigma[:, None, None]) @ v  # [b or 1, e, d, d]
        sides = folded.permute(0, 2, 1, 3).reshape(-1, d, e * d)
        y = x @ sides if len(sides) > 1 else x @ sides[0]
        f = F.elu(y).reshape(b, n, e, d)
      else:
        y = torch.einsum("bni,eij->benj", x, u) * sigma[:, None, None]
        f = F.elu(y @ v).transpose(1, 2)
      pooled = (x[:, :, None] + a * f).amax(1)
      weights = (pooled @ self.gate[layer]).softmax(1)
      x = x + a * (weights[:, None, None] @ f)[:, :, 0]
      y = F.elu(x @ w[0] + self.bias[layer, 0])
      x = x + a * F.elu(y @ w[1] + self.bias[layer, 1])
    return self.head(x.mean(1)), error


class Transformer(nn.Module):
  """`torch.nn.TransformerEncoder`, normalised first.

  `mha.set_fastpath_enabled(False)` before inference: PyTorch's own fast path
  leaves `scaled_dot_product_attention` out, and is slower on CPUs.
  """

  def __init__(
    self, length: int, d: int, layers: int, heads: int, mlp_dim: int
  ) -> None:
    super().__init__()
    self.embedding = Embedding(length, d)
    layer = nn.TransformerEncoderLayer(
      d,
      heads,
      mlp_dim,
      dropout=0.0,
      activation="gelu",
      batch_first=True,
      norm_first=True,
    )
    self.encoder = nn.TransformerEncoder(
      layer, layers, enable_nested_tensor=False
    )
    self.head = nn.Linear(d, CLASSES)

  def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and zero."""
    x = self.encoder(self.embedding(ids))
    return self.head(x.mean(1)), torch.zeros(())
