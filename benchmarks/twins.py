"""Twins of our encoders in PyTorch, written as their authors' code runs.

A twin has the weights of one of our models and computes the same outputs.
Attention is a function of heads, `ATTENDS[mixer](q, k, v, mask, arrays)`. Its
arguments are q, k and v [b, h, n, e], the mask [b, n] (True at tokens), and the
arrays that our mixer learns or draws. Twins have the default options of a
mixer. Lengths are multiples of 128, because partly filled blocks are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks import recurrent_twins
from jaxformers.models import MODELS, Model, Variant
from jaxformers.models.blocks.invertible import require_layers
from jaxformers.models.isometric import ring
from jaxformers.models.mixers import allpass
from jaxformers.models.variables import of_stack

Arrays = Mapping[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Arrays], Tensor]

BLOCK = 64  # Tokens of a block or chunk, and half of longformer's window.
LANDMARKS = 128  # Landmarks of nystromformer.
D, HEADS = 64, 2
# Projections to heads. Longformer has separate ones for global tokens, and
# sinkhorn has one to sort blocks.
PROJECTIONS = (
  "query",
  "key",
  "value",
  "query_global",
  "key_global",
  "value_global",
  "sort",
)
LOWEST = torch.finfo(torch.float32).min


def softmax(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes softmax attention with an array of n^2 scores."""
  return _weigh(_scores(q, k), mask[:, None, None]) @ v


def fused(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes softmax attention by PyTorch's kernel."""
  return F.scaled_dot_product_attention(q, k, v, mask[:, None, None])


def kernelized(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention with a Gaussian kernel (Skyformer, equation 4)."""
  q, k = _scaled(q, k)
  return _gaussian(q, k).masked_fill(~mask[:, None, None], 0) @ v


def linear(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes the attention of Linear Transformers, with features ELU + 1."""
  q, k = F.elu(q) + 1, (F.elu(k) + 1) * mask[:, None, :, None]
  return _by_features(q, k, v)


def linearized(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention without a softmax, q (k^T v)."""
  return q @ ((k * mask[:, None, :, None]).mT @ v)


def performer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes FAVOR+, with the maxima of the reference implementation."""
  # Features exp(x f - |x|^2 / 2), with the maxima subtracted.
  q, k = _scaled(q, k)
  features = arrays["features"].mT  # [h, e, f]
  q_half, k_half = (a.square().sum(-1, keepdim=True) / 2 for a in (q, k))
  q, k = q @ features, k @ features
  q = (q - q_half - q.detach().amax(-1, keepdim=True)).exp()
  k = (k - k_half - k.detach().amax((-1, -2), keepdim=True)).exp()
  return _by_features(q, k * mask[:, None, :, None], v)


def linformer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention to keys and values projected along the tokens."""
  tokens = mask[:, None, :, None]
  k = arrays["project_keys"] @ (k * tokens)
  v = arrays["project_values"] @ (v * tokens)
  return _scores(q, k).softmax(-1) @ v


def nystromformer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes the Nystrom approximation with means of tokens as landmarks."""
  # Landmarks are means of neighbouring queries and keys, [b, h, m, e].
  q, k = _scaled(q, k)
  q_means, k_means = (a.unflatten(2, (LANDMARKS, -1)).mean(3) for a in (q, k))
  # Product of three matrices, of which the middle one is inverted.
  to_means = (q @ k_means.mT).softmax(-1)
  square = (q_means @ k_means.mT).softmax(-1)
  from_means = _weigh(q_means @ k.mT, mask[:, None, None])
  return (to_means @ _inverse(square)) @ (from_means @ v)


def skyformer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes a Nystrom approximation of `kernelized`, random landmarks."""
  # Draw landmarks from queries and keys, [b, h, m, e].
  q, k = _scaled(q, k)
  index = (arrays["landmarks"] * q.shape[2]).long()
  half = len(index) // 2
  s = torch.cat([q[:, :, index[:half]], k[:, :, index[half:]]], 2)
  # Invert the regularised kernel of the landmarks, normalised by its row sums.
  square = _gaussian(s, s) + 0.1 * torch.eye(len(index))
  d = square.sum(-1, keepdim=True).rsqrt()
  inverse = _inverse(d * square * d.mT)
  # Multiply from right to left.
  y = _gaussian(s, k).masked_fill(~mask[:, None, None], 0) @ v
  return _gaussian(q, s) @ (d * (inverse @ (d * y)))


def synthesizer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention with learned logits, which all samples share."""
  logits = arrays["random"].expand(len(v), -1, -1, -1)
  return _weigh(logits, mask[:, None, None]) @ v


def informer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes ProbSparse attention: full rows for the top queries."""
  b, h, n, _ = q.shape
  # Measure every query on its sampled keys, by max minus mean of its scores.
  index = (arrays["samples"] * n).long()  # [n, samples]
  sampled = (q[..., None, :] @ k[:, :, index].mT).squeeze(-2)
  measure = sampled.amax(-1) - sampled.mean(-1)
  top = measure.topk(index.shape[1], sorted=False).indices
  # Attend from the selected queries; the others get the mean value.
  batch, head = torch.arange(b)[:, None, None], torch.arange(h)[None, :, None]
  rows = _weigh(_scores(q[batch, head, top], k), mask[:, None, None]) @ v
  y = v.mean(2, keepdim=True).expand(-1, -1, n, -1).clone()
  y[batch, head, top] = rows
  return y


def reformer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes LSH attention in sorted chunks, each with the previous chunk."""
  e = q.shape[-1]
  rotations = arrays["rotations"]  # [h, e, rounds, buckets / 2]
  rounds = rotations.shape[2]
  # Sort the tokens of every round by bucket.
  turned = torch.einsum("bhne,hert->bhrnt", q.detach(), rotations)
  bucket = torch.cat([turned, -turned], -1).argmax(-1)  # [b, h, r, n]
  order = bucket.argsort(dim=-1, stable=True)
  rank = order.argsort(-1)

  def cut(x: Tensor) -> Tensor:
    index = order[..., None].expand(-1, -1, -1, -1, x.shape[-1])
    x = x[:, :, None].expand(-1, -1, rounds, -1, -1).gather(3, index)
    return x.unflatten(3, (-1, BLOCK))  # [b, h, r, B, s, e]

  # Keys are normalised queries; scores are [b, h, r, B, s, 2 s].
  k = q / (q.square().sum(-1, keepdim=True) + 1e-6 * e).sqrt()
  scores = cut(q) @ _with_previous(cut(k)).mT
  # Find the rounds in which query and key share a bucket, and subtract the log
  # of their number: several rounds may reach the same key.
  places = torch.stack([bucket, rank // BLOCK], -1)  # [b, h, r, n, 2]
  places = cut(places.permute(0, 1, 3, 2, 4).flatten(3))
  places = places.unflatten(-1, (rounds, 2))  # [b, h, r, B, s, r, 2]
  query, key = places[..., :, None, :, :], _with_previous(places, 3)
  key = key[..., None, :, :, :]
  gap = query[..., 1] - key[..., 1]
  reached = (query[..., 0] == key[..., 0]) & ((gap == 0) | (gap == 1))
  scores = scores - reached.sum(-1).clamp(min=1).log()
  # Mask keys that the round itself does not reach.
  is_round = torch.eye(rounds, dtype=torch.bool)[:, None, None, None]
  seen = (reached & is_round).any(-1)
  # A token attends to itself only if there is no other key.
  position = order.unflatten(3, (-1, BLOCK))
  itself = position[..., None] == _with_previous(position, 3)[..., None, :]
  # The first chunk has no previous chunk.
  seen[..., 0, :, :BLOCK] = itself[..., 0, :, :BLOCK] = False
  scores = scores.masked_fill(itself, -1e5).masked_fill(~seen, LOWEST)
  # Attend, and weigh the rounds by their softmax denominators.
  total = scores.logsumexp(-1, keepdim=True)
  y = (scores - total).exp() @ _with_previous(cut(v))

  def restore(x: Tensor) -> Tensor:
    index = rank[..., None].expand(-1, -1, -1, -1, x.shape[-1])
    return x.flatten(3, 4).gather(3, index)

  return (restore(total).softmax(2) * restore(y)).sum(2)


def bigbird(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention to first, last, neighbouring and random blocks."""
  n = q.shape[2]
  blocks = n // BLOCK
  i = torch.arange(blocks)
  # Draw random blocks that are neither in the window nor global.
  free = ((i[:, None] - i).abs() > 1) & (i > 0) & (i < blocks - 1)
  priority = arrays["order"][:, :blocks, :blocks].masked_fill(~free, -1)
  priority, drawn = priority.topk(min(3, blocks))
  # List the blocks that each block attends to, with a mask of valid entries.
  around = i[:, None] + torch.arange(-1, 2)
  inside = (around > 0) & (around < blocks - 1)
  around, inside = (
    a.expand(len(drawn), -1, -1) for a in (around.clamp(0, blocks - 1), inside)
  )
  ends = torch.tensor([0, blocks - 1]).expand(len(drawn), blocks, 2)
  index = torch.cat([ends, around, drawn], -1)  # [h, B, 8]
  is_end = torch.ones_like(ends, dtype=torch.bool)
  counts = torch.cat([is_end, inside, priority >= 0], -1)
  # Gather the blocks of keys and values, and attend.
  k_blocks, v_blocks = (
    a.unflatten(2, (-1, BLOCK))[
      :, torch.arange(len(drawn))[:, None, None], index
    ]
    for a in (k, v)
  )
  tokens = mask.unflatten(1, (-1, BLOCK))[:, index] & counts[..., None]
  scores = _scores(q.unflatten(2, (-1, BLOCK)), k_blocks.flatten(3, 4))
  y = _weigh(scores, tokens.flatten(3)[:, :, :, None]) @ v_blocks.flatten(3, 4)
  # The first and the last block attend to all tokens.
  ends = torch.cat([q[:, :, :BLOCK], q[:, :, -BLOCK:]], 2)
  rows = _weigh(_scores(ends, k), mask[:, None, None]) @ v
  y = y.flatten(2, 3)[:, :, BLOCK:-BLOCK]
  return torch.cat([rows[:, :, :BLOCK], y, rows[:, :, BLOCK:]], 2)


def longformer(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention to 64 tokens on each side and to the first token."""
  n = q.shape[2]
  # Cut overlapping chunks of three blocks, with zeros beyond the ends.
  k_near, v_near = (
    F.pad(a, (0, 0, BLOCK, BLOCK)).unfold(2, 3 * BLOCK, BLOCK).mT
    for a in (k, v)
  )
  # Mask the keys outside the window, and the global token.
  local = mask & (torch.arange(n) > 0)
  local = F.pad(local, (BLOCK, BLOCK)).unfold(1, 3 * BLOCK, BLOCK)
  offset = torch.arange(3 * BLOCK) - BLOCK - torch.arange(BLOCK)[:, None]
  near = local[:, None, :, None] & (offset.abs() <= BLOCK)
  # Compute one softmax over the window and the global token.
  blocks = q.unflatten(2, (-1, BLOCK))
  first = _scores(blocks, k[:, :, None, :1])
  seen = mask[:, None, None, None, :1].expand(-1, 1, *near.shape[2:4], -1)
  scores = torch.cat([first, _scores(blocks, k_near)], -1)
  weights = _weigh(scores, torch.cat([seen, near], -1))
  y = weights[..., :1] * v[:, :, None, :1] + weights[..., 1:] @ v_near
  # The global token attends to all tokens, with separate projections.
  q, k, v = (arrays[f"{name}_global"] for name in ("query", "key", "value"))
  row = _weigh(_scores(q[:, :, :1], k), mask[:, None, None]) @ v
  return torch.cat([row, y.flatten(2, 3)[:, :, 1:]], 2)


def local(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention within blocks."""
  q, k, v = (a.unflatten(2, (-1, BLOCK)) for a in (q, k, v))
  seen = mask.unflatten(1, (-1, BLOCK))[:, None, :, None]
  return (_weigh(_scores(q, k), seen) @ v).flatten(2, 3)


def sparse(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention within blocks and to the last 4 tokens of others."""
  q, k, v = (a.unflatten(2, (-1, BLOCK)) for a in (q, k, v))
  tokens = mask.unflatten(1, (-1, BLOCK))
  # Mask the tokens of the block, and the last tokens of the other blocks.
  inside = tokens[:, None, :, None].expand(-1, 1, -1, BLOCK, -1)
  last_k, last_v = (a[:, :, :, -4:].flatten(2, 3)[:, :, None] for a in (k, v))
  other = ~torch.eye(q.shape[2], dtype=torch.bool)
  outside = tokens[:, None, :, -4:] & other[..., None]
  outside = outside.flatten(2)[:, None, :, None].expand(-1, 1, -1, BLOCK, -1)
  # Compute one softmax over both.
  scores = torch.cat([_scores(q, k), _scores(q, last_k)], -1)
  weights = _weigh(scores, torch.cat([inside, outside], -1))
  y = weights[..., :BLOCK] @ v + weights[..., BLOCK:] @ last_v
  return y.flatten(2, 3)


def sinkhorn(
  q: Tensor, k: Tensor, v: Tensor, mask: Tensor, arrays: Arrays
) -> Tensor:
  """Computes attention to a block and to the block sorted to it.

  The sorting matrix is normalised in five Sinkhorn iterations.
  """
  q, k, v, x = (a.unflatten(2, (-1, BLOCK)) for a in (q, k, v, arrays["sort"]))
  tokens = mask.unflatten(1, (-1, BLOCK))
  blocks, is_token = q.shape[2], tokens[:, None, :, :, None]
  filled = tokens.any(2)
  pairs = (filled[:, :, None] & filled[:, None])[:, None]
  # Normalise rows and columns of the sorting matrix [b, h, B, B], for the
  # blocks that have tokens.
  sums = (x * is_token).sum(3).relu()
  log_p = sums @ arrays["sort_kernel"][None, :, :, :blocks] / 0.75
  log_p = log_p.masked_fill(~pairs, LOWEST)
  for _ in range(5):
    for axis in (-1, -2):
      log_p = log_p - log_p.logsumexp(axis, keepdim=True)
      log_p = log_p.masked_fill(~pairs, LOWEST)
  p = log_p.exp() * pairs
  # Average the tokens at the same place of all blocks by the sorting matrix.
  share = p @ tokens[:, None].to(p.dtype)
  is_seen = share > 1e-6
  divisor = share.masked_fill(~is_seen, 1.0)
  k_far, v_far = (
    (p @ (a * is_token).flatten(3)).view_as(a) / divisor[..., None]
    for a in (k, v)
  )
  # Compute one softmax over the block and the sorted block.
  far = _scores(q, k_far) + divisor.log()[:, :, :, None]
  seen = tokens[:, None, :, None].expand(-1, far.shape[1], -1, BLOCK, -1)
  far_seen = is_seen[:, :, :, None].expand(-1, -1, -1, BLOCK, -1)
  scores = torch.cat([_scores(q, k), far], -1)
  weights = _weigh(scores, torch.cat([seen, far_seen], -1))
  y = weights[..., :BLOCK] @ v + weights[..., BLOCK:] @ v_far
  return y.flatten(2, 3)


def _scores(q: Tensor, k: Tensor) -> Tensor:
  """Returns q k^T / sqrt(e)."""
  return q @ k.mT / q.shape[-1] ** 0.5


def _weigh(scores: Tensor, seen: Tensor) -> Tensor:
  """Returns the softmax of the scores where `seen` is True."""
  return scores.masked_fill(~seen, LOWEST).softmax(-1)


def _scaled(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
  """Divides q and k by e^(1/4) each."""
  scale = q.shape[-1] ** -0.25
  return q * scale, k * scale


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
  """Returns exp(-|x - y|^2 / 2) of x [.., n, e] and y [.., m, e]."""
  xx, yy = (a.square().sum(-1, keepdim=True) / 2 for a in (x, y))
  return (x @ y.mT - xx - yy.mT).exp()


def _by_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
  """Returns q (k^T v) / (q sum_j k_j)."""
  total = q @ k.sum(2)[..., None]
  return q @ (k.mT @ v) / total


def _inverse(a: Tensor) -> Tensor:
  """Inverts a [b, h, m, m] by six steps (Nystromformer, equation 11)."""
  eye = torch.eye(a.shape[-1])
  columns, rows = (a.sum(i).amax(-1)[..., None, None] for i in (-2, -1))
  z = a.mT / (columns * rows)
  for _ in range(6):
    az = a @ z
    z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
  return z


def _with_previous(x: Tensor, axis: int = 3) -> Tensor:
  """Puts the previous chunk before each chunk; the last before the first."""
  return torch.cat([x.roll(1, axis), x], axis + 1)


ATTENDS: dict[str, Attend] = {
  f.__name__: f
  for f in (
    softmax, kernelized, linear, linearized, performer, linformer,
    nystromformer, skyformer, synthesizer, informer, reformer, bigbird,
    longformer, local, sparse, sinkhorn,
  )
}  # fmt: skip


def _tensor(array: Any) -> Tensor:
  """Converts an array of JAX into a tensor."""
  return torch.tensor(np.asarray(array))


def _linear(inputs: int, *weights: Mapping[str, Any]) -> nn.Linear:
  """Returns one linear layer that concatenates our projections.

  Args:
    inputs: number of input channels.
    *weights: weights of our projections: a kernel, and possibly a bias.
  """
  # Concatenate the kernels [inputs, outputs] and the biases.
  kernels = [_tensor(w["kernel"]).reshape(inputs, -1) for w in weights]
  biases = [_tensor(w["bias"]).flatten() for w in weights if "bias" in w]
  kernel = torch.cat(kernels, 1)
  layer = nn.Linear(*kernel.shape, bias=bool(biases))
  with torch.no_grad():
    layer.weight.copy_(kernel.T)
    if biases:
      layer.bias.copy_(torch.cat(biases))
  return layer


def _norm(weights: Mapping[str, Any]) -> nn.LayerNorm:
  """Returns a layer norm with our weights."""
  layer = nn.LayerNorm(len(weights["scale"]))
  with torch.no_grad():
    layer.weight.copy_(_tensor(weights["scale"]))
    layer.bias.copy_(_tensor(weights["bias"]))
  return layer


class Rotations(nn.Module):
  """Orthogonal projections, whose outputs are concatenated."""

  def __init__(self, weights: list[Mapping[str, Any]]) -> None:
    super().__init__()
    self.layers = nn.ModuleList()
    for w in weights:
      layer = _linear(len(w["kernel"]), w)
      rotation = layer.weight.detach().clone()
      layer = parametrizations.orthogonal(layer)
      layer.weight = rotation
      self.layers.append(layer)

  def forward(self, x: Tensor) -> Tensor:
    """Maps x [b, n, d] -> [b, n, k d], for k projections."""
    return torch.cat([layer(x) for layer in self.layers], -1)


class Layer(nn.Module):
  """Layer of attention: Pre-LN, ReZero, or only attention.

  Args:
    weights: weights of our layer.
    rotations: rotations of our layer; {} for none.
    drawn: arrays that our mixer draws.
    attend: attention function of heads.
    options: options of our mixer.
  """

  def __init__(
    self,
    weights: Mapping[str, Any],
    rotations: Mapping[str, Any],
    drawn: Mapping[str, Any],
    attend: Attend,
    options: Mapping[str, Any],
  ) -> None:
    super().__init__()
    self.attend, self.options = attend, options
    mixer = dict(weights["mixer"])
    self.out = _linear(D, mixer.pop("out"))
    # Collect the projections to heads, which have equal widths.
    self.names = [name for name in PROJECTIONS if name in mixer]
    parts = [mixer.pop(name) for name in self.names]
    if rotations:
      self.names = list(PROJECTIONS[:3])
      parts = [
        {"kernel": rotations["mixer"][f"{name}_skew"]}
        | {"bias": mixer.pop(f"{name}_bias")}
        for name in self.names
      ]
      mixer = {}
    self.heads = Rotations(parts) if rotations else _linear(D, *parts)
    # Keep the other learned arrays of the mixer, and the arrays that it draws.
    self.learned = nn.ParameterDict({k: _tensor(a) for k, a in mixer.items()})
    self.drawn = {name: _tensor(a) for name, a in drawn.items()}
    # Keep the norms, the feed-forward part and the residual weight that the
    # block has.
    self.norms = nn.ModuleList(
      _norm(weights[k]) for k in ("norm_mixer", "norm_mlp") if k in weights
    )
    has_mlp = "up" in weights
    self.up = _linear(D, weights["up"]) if has_mlp else None
    self.down = _linear(2 * D, weights["down"]) if has_mlp else None
    r = weights.get("residual")
    self.residual = None if r is None else nn.Parameter(_tensor(r))

  def forward(
    self, x: Tensor, mask: Tensor, first: Tensor | None
  ) -> tuple[Tensor, Tensor]:
    """Applies the layer to x [b, n, d].

    Args:
      x: inputs [b, n, d].
      mask: mask of the tokens [b, n].
      first: values of the first layer; None in the first layer.

    Returns:
      The outputs [b, n, d] and the values of this layer.
    """
    y, v = self.mix(self.norms[0](x) if self.norms else x, mask, first)
    if self.up is None:
      return y, v
    r = 1.0 if self.residual is None else self.residual
    x = x + r * y
    y = self.norms[1](x) if self.norms else x
    return x + r * self.down(F.gelu(self.up(y))), v

  def mix(
    self, x: Tensor, mask: Tensor, first: Tensor | None
  ) -> tuple[Tensor, Tensor]:
    """Returns the outputs of the mixer [b, n, d], and its values."""
    # Project to heads, each [b, h, n, e].
    parts = self.heads(x).chunk(len(self.names), -1)
    heads = {
      name: part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
      for name, part in zip(self.names, parts, strict=True)
    }
    v = heads["value"]
    # Symmetric attention has no queries. The synthesizer has no queries or
    # keys.
    k = heads.get("key", v)
    arrays = {**self.learned, **self.drawn, **heads}
    y = self.attend(heads.get("query", k), k, v, mask, arrays)
    # NeuTRENO adds the fidelity term, a multiple of v_1 - v.
    if "fidelity" in self.options and first is not None:
      y = y + self.options["fidelity"] * (first - v)
    return self.out(y.transpose(1, 2).flatten(-2)), v


class IsometricLayer(nn.Module):
  """Layer of `isometric`: rotations around filters on a ring, then u + a |u|.

  Args:
    layers: our layers.
    weights: weights of one layer, `isometric.layer.Weights`.
  """

  def __init__(self, layers: Any, weights: Any) -> None:
    super().__init__()
    self.rotations = nn.ModuleList(
      Rotations([{"kernel": matrix}]) for matrix in weights.mixing
    )
    decay, angle, a, bias = (
      nn.Parameter(_tensor(x))
      for x in (*weights.sections, weights.a, weights.bias)
    )
    self.decay, self.angle, self.a, self.bias = decay, angle, a, bias
    # Dilations of the filters, and their order in the cascade.
    d = weights.mixing.shape[-1]
    self.dilations = layers.dilations or ring.spread_dilations(
      d, layers.max_len
    )
    self.order = ring.delays(self.dilations, len(weights.sections.decay))

  def forward(
    self, x: Tensor, mask: Tensor, first: Tensor | None
  ) -> tuple[Tensor, Tensor]:
    """Maps x [b, n, d]; all positions are tokens."""
    # Rotate, and pair the channels to complex numbers [b, d / 2, n].
    before, after = self.rotations
    real, imag = before(x).mT.chunk(2, 1)
    # Filter in the frequency domain, and rotate back.
    z = torch.fft.fft(torch.complex(real, imag))
    z = torch.fft.ifft(z * self._response(x.shape[1]))
    y = after(torch.cat([z.real, z.imag], 1).mT) + self.bias
    return y + self.a * y.abs(), x

  def _response(self, n: int) -> Tensor:
    """Returns the transfer function of all sections, [d / 2, n]."""
    # Delays exp(-2 pi i m k / n) of each dilation m at each frequency k.
    steps = torch.tensor(self.dilations)[:, None]
    angle = -2 * torch.pi * ((steps * torch.arange(n)) % n) / n
    delay = torch.polar(torch.ones_like(angle), angle)[:, None, None]
    delay = torch.cat([delay, delay.conj()], 2)  # Forwards, then backwards.
    # Multiply the sections (z - conj(lambda)) / (1 - lambda z).
    size = torch.exp(-allpass.SLOWEST - self.decay.exp())
    factors = torch.polar(size, self.angle).unflatten(1, (len(delay), -1, 2))
    response = torch.ones(())
    for index, factor in zip(self.order, factors[..., None], strict=True):
      z = delay[index]
      response = response * (z - factor.conj()) / (1 - factor * z)
    return response.flatten(0, 2)


class ContractiveLayer(nn.Module):
  """Layer of the block `contractive`: x + a M(x), then y + a H(y).

  Args:
    name: name of the model.
    layers: our layers.
    weights: weights of one layer.
  """

  def __init__(self, name: str, layers: Any, weights: Any) -> None:
    super().__init__()
    self.mix = recurrent_twins.CONTRACTIONS[name]
    mixer = layers.block.mixer(parent=None)
    self.options = {"max_len": mixer.max_len}
    if name == "allpass":
      dilations = mixer.dilations or allpass.cascade_dilations(mixer.max_len)
      self.options |= {"dilations": dilations, "slowest": allpass.SLOWEST}
    # Keep the learned arrays, the rotations and the strength of the branches.
    params, rotations = weights["params"], weights["rotations"]
    free = {k: v for k, v in params["mixer"].items() if "_skew" not in k}
    self.learned = nn.ParameterDict(
      {name: nn.Parameter(_tensor(value)) for name, value in free.items()}
    )
    self.mixing, self.feed_forward = (
      Rotations([{"kernel": matrix} for matrix in matrices]).layers
      for matrices in (
        rotations["mixer"]["mixing_skew"],
        rotations["feed_forward_skew"],
      )
    )
    self.a = nn.Parameter(_tensor(layers.block.strength(params["alpha"])))
    self.bias = nn.Parameter(_tensor(params["bias"]))

  def forward(
    self, x: Tensor, mask: Tensor, first: Tensor | None
  ) -> tuple[Tensor, Tensor]:
    """Maps x [b, n, d]; all positions are tokens."""
    weights = {**self.learned, "mixing": self.mixing}
    x = x + self.a * self.mix(weights, x, self.options)
    y = x
    for layer, bias in zip(self.feed_forward, self.bias, strict=True):
      y = F.elu(layer(y) + bias)
    return x + self.a * y, x


def _recurrent_layer(
  variant: Variant, weights: Mapping[str, Any]
) -> recurrent_twins.RecurrentLayer:
  """Builds the layer of a recurrent mixer with our weights."""
  options = {}
  if variant.mixer == "delta":
    options = {**variant.defaults, **variant.fixed}
  names = ("norm", "norm_mixer", "norm_mlp")
  mlp = [
    _linear(len(weights[k]["kernel"]), weights[k])
    for k in ("up", "down")
    if k in weights
  ]
  return recurrent_twins.RecurrentLayer(
    variant.mixer,
    jax.tree.map(_tensor, dict(weights)),
    [_norm(weights[name]) for name in names if name in weights],
    tuple(mlp),
    options,
  )


class Twin(nn.Module):
  """Classifier with the weights of our model, ids [b, n] to logits [b, 2].

  Args:
    model: classifier with d = 64, two heads, learned positions, a feed-forward
      width of 128 and the pool "mean".
    variables: variables of the model. `rotations` and `random` are read if the
      model has them.
    attend: attention function of heads; None for the function in `ATTENDS`.
  """

  def __init__(
    self,
    model: Model,
    variables: Mapping[str, Any],
    attend: Attend | None = None,
  ) -> None:
    super().__init__()
    # Copy the embeddings of tokens and positions.
    variant = MODELS[model.config.name]
    weights = variables["params"]["encoder"]
    embedding = weights["embedding"]
    tokens = (embedding["tokens"]["embedding"], embedding["positions"])
    self.tokens, self.places = (
      nn.Embedding.from_pretrained(_tensor(array), freeze=False)
      for array in tokens
    )
    # Build the layers by the block and the mixer of the model.
    layers = [name for name in sorted(weights) if name.startswith("layer_")]
    rotations, drawn = (
      variables.get(name, {}).get("encoder", {})
      for name in ("rotations", "random")
    )
    if variant.block in ("isometric", "contractive"):
      encoder = of_stack(variables, "encoder")
      stack = require_layers(model.stacks()["encoder"])
      layer = IsometricLayer
      if variant.block == "contractive":
        layer = functools.partial(ContractiveLayer, model.config.name)
      self.layers = nn.ModuleList(
        layer(stack, part) for part in stack.weights(encoder)
      )
    elif variant.mixer in recurrent_twins.MIXERS:
      self.layers = nn.ModuleList(
        _recurrent_layer(variant, weights[name]) for name in layers
      )
    else:
      self.layers = nn.ModuleList(
        Layer(
          weights[name],
          rotations.get(name, {}),
          drawn.get(name, {}).get("mixer", {}),
          attend or ATTENDS[variant.mixer],
          variant.defaults,
        )
        for name in layers
      )
    # Copy the last norm and the head.
    self.norm = _norm(weights["norm"]) if "norm" in weights else nn.Identity()
    self.head = _linear(D, variables["params"]["head"]["logits"])

  def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits, and zero for the auxiliary loss."""
    mask = ids > 0
    x = self.tokens(ids) + self.places.weight
    first = None
    for layer in self.layers:
      x, v = layer(x, mask, first)
      first = v if first is None else first
    # Pool by the mean over tokens, without padding.
    x = self.norm(x) * mask[..., None]
    return self.head(x.sum(1) / mask.sum(1)[:, None]), torch.zeros(())
