"""Mixers with matrix states in PyTorch with our weights, for `twins`.

All read in both directions. The delta rule uses the chunks of `transformers`,
as its models do without a GPU. The other recurrences are loops over tokens. The
code does not support padding: all positions are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Any]
HEADS = 4


def read(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
  """Returns the outputs of a recurrence, one token after another.

  Args:
    q, k: queries and keys, [b, n, h, K].
    v: values, [b, n, h, V].
    log_decay: logs of the factors, [b, n, h, K or 1].
  """
  state = torch.zeros(*q[:, 0].shape, v.shape[-1], dtype=q.dtype)
  outputs = []
  for t in range(q.shape[1]):
    state = log_decay[:, t, ..., None].exp() * state
    state = state + k[:, t, ..., None] * v[:, t, :, None]
    outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
  return torch.stack(outputs, 1)


def delta_rule_in_chunks(
  q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
  """Returns outputs and the last state by the chunks of `transformers`.

  Args:
    q, k: queries and keys, [b, n, h, K].
    v: values, [b, n, h, V].
    log_decay: logs of the factors, [b, n, h].
    beta: strengths of the writes, [b, n, h].
  """
  from transformers.models.qwen3_next import modeling_qwen3_next

  chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule
  # With kernels of another package installed, the plain form is wrapped.
  chunked = getattr(chunked, "__wrapped__", chunked)
  # The function divides queries by sqrt(K).
  q = q * math.sqrt(q.shape[-1])
  return chunked(q, k, v, log_decay, beta, output_final_state=True)


def _both_ways(run: Callable[..., Tensor], *tokens: Tensor) -> Tensor:
  """Adds the outputs of both directions."""
  return run(*tokens) + run(*(x.flip(1) for x in tokens)).flip(1)


def _heads(x: Tensor, h: int = HEADS) -> Tensor:
  return x.unflatten(-1, (h, -1))


def _rms(x: Tensor, scale: Tensor) -> Tensor:
  return F.rms_norm(x, x.shape[-1:], eps=1e-5) * scale


def _unit(x: Tensor) -> Tensor:
  return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def short_convolution(w: Weights, u: Tensor) -> Tensor:
  """Applies a causal depthwise convolution to u [b, n, d]."""
  kernel = w["conv"].T[:, None]  # [d, 1, width].
  padded = F.pad(u.mT, (kernel.shape[-1] - 1, 0))
  bias = w.get("conv_bias")
  return F.conv1d(padded, kernel, bias, groups=len(kernel)).mT


def _log_decay(w: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
  """Returns steps and log factors, [b, n, h]."""
  step = F.softplus(x + w["step_bias"])
  return step, -step * w["A_log"].exp()


def _gated(w: Weights, y: Tensor, x: Tensor) -> Tensor:
  """Normalises each head, and multiplies by SiLU(W x)."""
  return _rms(y, w["scale"]).flatten(-2) * F.silu(w["gate"](x))


def delta(
  w: Weights,
  x: Tensor,
  residual: Tensor,
  *,
  signed: bool = False,
  num_householder: int = 1,
  expansion: int = 1,
  **_: Any,
) -> Tensor:
  """Computes the delta rule; the writes of a token follow one another."""
  (b, n, d), r = x.shape, num_householder
  key, value = d, d * expansion
  u = F.silu(short_convolution(w, w["read"](x)))
  q, k, v = u.split((key, r * key, r * value), -1)
  q, k = _unit(_heads(q)) * (d // HEADS) ** -0.5, _unit(_heads(k, r * HEADS))
  # Lay the writes out as tokens; the query reads after the last one.
  k, v = (a.reshape(b, n * r, HEADS, -1) for a in (k, v))
  beta = w["strength"](x).sigmoid().reshape(b, n * r, HEADS)
  beta = 2 * beta if signed else beta
  gate = torch.zeros(b, n, HEADS)
  if "A_log" in w:
    gate = _log_decay(w, w["decay"](x))[1]
  first = F.pad(gate[:, :, None], (0, 0, 0, r - 1)).flatten(1, 2)
  queries = q.repeat_interleave(r, 1)

  def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
  ) -> Tensor:
    return delta_rule_in_chunks(q, k, v, g, beta)[0][:, r - 1 :: r]

  def flipped(a: Tensor) -> Tensor:
    return a.unflatten(1, (n, r)).flip(1).flatten(1, 2)

  tokens = (queries, k, v, first, beta)
  y = forward(*tokens) + forward(*map(flipped, tokens)).flip(1)
  if "gate" in w:
    return w["output"](_gated(w, y, x))
  return w["output"](_rms(y, w["scale"]).flatten(-2))


def gla(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes gated linear attention, token by token."""
  q, k, v = (_heads(w[name](x)) for name in ("query", "key", "value"))
  log_decay = F.logsigmoid(_heads(w["decay_out"](w["decay_in"](x)))) / 16
  y = _both_ways(read, q * q.shape[-1] ** -0.5, k, v, log_decay)
  return w["output"](_gated(w, y, x))


def retnet(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes retention, token by token."""
  q, k, v = (_heads(w[name](x)) for name in ("query", "key", "value"))
  # Rotate the pairs (i, i + e / 2).
  half = q.shape[-1] // 2
  rates = 10_000.0 ** (-torch.arange(half) / half)
  angles = torch.arange(x.shape[1])[:, None, None] * rates
  cos, sin = angles.cos(), angles.sin()

  def turn(a: Tensor) -> Tensor:
    left, right = a.split(half, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

  log_decay = torch.log1p(-(2.0 ** -(5 + torch.arange(HEADS)))[:, None])
  log_decay = log_decay.expand(*q.shape[:3], 1)
  q = turn(q) * q.shape[-1] ** -0.5
  y = _both_ways(read, q, turn(k), v, log_decay)
  return w["output"](_gated(w, y, x))


def hgrn2(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes HGRN2, token by token."""
  bound = w["lower_bound"].sigmoid()
  forget = bound + (1 - bound) * w["forget"](x).sigmoid()
  q, v = _heads(F.silu(w["query"](x))), _heads(w["value"](x))
  forget = _heads(forget)
  y = _both_ways(read, q, 1 - forget, v, forget.log())
  return w["output"](_rms(y.flatten(-2), w["scale"]))


def mamba2(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes Mamba-2, token by token."""
  inner, h = w["gate"].out_features, w["step"].out_features
  u = F.silu(short_convolution(w, w["read"](x)))
  size = (u.shape[-1] - inner) // 2
  u, b, c = u.split((inner, size, size), -1)
  u = _heads(u, h)
  step, log_decay = _log_decay(w, w["step"](x))
  b, c = (a[:, :, None].expand(-1, -1, h, -1) for a in (b, c))
  y = _both_ways(read, c, b, step[..., None] * u, log_decay[..., None])
  y = (y + w["D"][:, None] * u).flatten(-2)
  return w["output"](_rms(y * F.silu(w["gate"](x)), w["scale"]))


def mlstm(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes mLSTM, token by token, without a running maximum."""
  u = w["read"](x)
  c = F.silu(short_convolution(w, u))

  def blocks(a: Tensor, name: str) -> Tensor:
    kernel = w[name]
    a = a.unflatten(-1, kernel.shape[:2])
    return torch.einsum("bnhe,hef->bnhf", a, kernel).flatten(-2)

  q, k, v = blocks(c, "query"), blocks(c, "key"), blocks(u, "value")
  gates = torch.cat([q, k, v], -1) @ w["gates"] + w["gates_bias"]
  enter, forget = gates.chunk(2, -1)
  log_decay = F.logsigmoid(forget)[..., None]
  q, k, v = (_heads(a) for a in (q, k, v))
  v = F.pad(v, (0, 1), value=1.0)
  tokens = (q * q.shape[-1] ** -0.5, k * enter.exp()[..., None], v, log_decay)

  def run(*tokens: Tensor) -> Tensor:
    y = read(*tokens)
    return y[..., :-1] / y[..., -1:].abs().clamp_min(1)

  y = _both_ways(run, *tokens)
  y = F.layer_norm(y, y.shape[-1:], eps=1e-5).flatten(-2) * w["scale"]
  return w["output"]((y + w["skip"] * c) * F.silu(w["gate"](x)))


def _cell(name: str, gates: str, kind: str) -> Callable[..., Tensor]:
  """Returns the mixer of a cell of PyTorch, in both directions."""

  def run(w: Weights, x: Tensor, index: int) -> Tensor:
    cell = f"{kind}_{index}"
    d = x.shape[-1]

    def stack(part: str, field: str) -> Tensor:
      rows = [getattr(w[f"{cell}.{part}{g}"], field) for g in gates]
      empty = torch.zeros(d)
      return torch.cat([empty if row is None else row for row in rows])

    weights = [stack("i", "weight"), stack("h", "weight")]
    weights += [stack("i", "bias"), stack("h", "bias")]
    start = torch.zeros(1, x.shape[0], d)
    if name == "lstm":
      options = (True, 1, 0.0, False, False, True)
      return torch.lstm(x, (start, start), weights, *options)[0]
    return torch.gru(x, start, weights, True, 1, 0.0, False, False, True)[0]

  def mix(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
    behind = run(w, x.flip(1), 1).flip(1)
    return w["output"](torch.cat([run(w, x, 0), behind], -1))

  return mix


def mingru(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes minGRU, token by token."""

  def run(x: Tensor, end: str) -> Tensor:
    z = w[f"gate{end}"](x).sigmoid()
    new = w[f"candidate{end}"](x)
    new = torch.where(new > 0, new + 0.5, new.sigmoid())
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
      h = (1 - z[:, t]) * h + z[:, t] * new[:, t]
      states.append(h)
    return torch.stack(states, 1)

  behind = run(x.flip(1), "_reverse").flip(1)
  return w["output"](torch.cat([run(x, ""), behind], -1))


MIXERS: dict[str, Callable[..., Tensor]] = {
  "delta": delta,
  "gla": gla,
  "retnet": retnet,
  "hgrn2": hgrn2,
  "mamba2": mamba2,
  "mlstm": mlstm,
  "lstm": _cell("lstm", "ifgo", "OptimizedLSTMCell"),
  "gru": _cell("gru", "rzn", "GRUCell"),
  "mingru": mingru,
}
