"""Recurrent mixers in PyTorch with our weights, which `twins` uses.

Time-invariant recurrences are computed as convolutions by FFT. Recurrences
whose factors depend on tokens are computed by a loop over tokens, as in the
reference implementation of Mamba. The code does not support padding: all
positions are tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import matrix_twins

Weights = Mapping[str, Any]
Arrays = Mapping[str, Tensor]


def _complex(real: Tensor, imag: Tensor) -> Tensor:
  return torch.complex(real, imag)


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
  """Returns the causal convolution y_t = sum_l k_l x_(t-l).

  Args:
    x: inputs [b, n, ...].
    kernel: kernel [n, ...].
  """
  # Pad both to 2 n, so that the circular convolution does not wrap around.
  n = x.shape[1]
  if x.is_complex() or kernel.is_complex():
    spectrum = torch.fft.fft(x, 2 * n, 1) * torch.fft.fft(kernel, 2 * n, 0)
    return torch.fft.ifft(spectrum, dim=1)[:, :n]
  spectrum = torch.fft.rfft(x, 2 * n, 1) * torch.fft.rfft(kernel, 2 * n, 0)
  return torch.fft.irfft(spectrum, 2 * n, 1)[:, :n]


def _both_ways(x: Tensor, kernel: Tensor) -> Tensor:
  """Returns the forward and the backward states, concatenated."""
  back = _convolve(x.flip(1), kernel).flip(1)
  return torch.cat([_convolve(x, kernel), back], -1)


def _powers(log: Tensor, n: int) -> Tensor:
  """Returns exp(l log) for l < n, [n, ...]."""
  steps = torch.arange(n).view(-1, *(1,) * log.ndim)
  return (steps * log).exp()


def _gated(w: Weights, y: Tensor, form: str, approximate: str) -> Tensor:
  """Applies GELU and a gate: a GLU ("full") or half a GLU ("half1")."""
  g = F.gelu(y, approximate=approximate)
  gate = torch.sigmoid(w["gate.gate"](g))
  return (w["gate.value"](g) if form == "full" else g) * gate


def lru(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes the LRU in both directions, with a GLU."""
  # log lambda = -exp(nu) + i exp(theta), and the normalised B.
  log = _complex(-w["nu_log"].exp(), w["theta_log"].exp())
  b = _complex(w["B_re"], w["B_im"]) * w["gamma_log"].exp()[:, None]
  drive = x.to(b.dtype) @ b.T
  # States [b, n, 2 N], and outputs Re(C h) + D x.
  h = _both_ways(drive, _powers(log, x.shape[1]))
  y = (h @ _complex(w["C_re"], w["C_im"]).T).real + w["D"] * x
  return _gated(w, y, "full", "tanh")


def s5(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes S5 in both directions, with zero-order hold and half a GLU."""
  # Zero-order hold: B (exp(lambda step) - 1) / lambda.
  eigenvalue = _complex(w["Lambda_re"], w["Lambda_im"])
  log = w["log_step"][:, 0].exp() * eigenvalue
  b = torch.view_as_complex(w["B"]) * ((log.exp() - 1) / eigenvalue)[:, None]
  # States [b, n, 2 N], and outputs 2 Re(C h) + D x.
  h = _both_ways(x.to(b.dtype) @ b.T, _powers(log, x.shape[1]))
  c = torch.cat([torch.view_as_complex(w[name]) for name in ("C1", "C2")], 1)
  y = 2 * (h @ c.T).real + w["D"] * x
  return _gated(w, y, "half1", "tanh")


def _s4d_kernels(w: Weights, n: int) -> tuple[Tensor, Tensor]:
  """Returns the kernels of S4D-LegS in both directions, [n, d].

  The backward kernel begins with the next token.
  """
  # Zero-order hold, with a gain of B (exp(lambda step) - 1) / lambda.
  eigenvalue = _complex(-w["log_A_real"].exp(), w["A_imag"])
  log = eigenvalue * w["log_dt"].exp()[:, None]
  gain = torch.view_as_complex(w["B"]) * (log.exp() - 1) / eigenvalue
  powers = _powers(log, n)  # [n, d, N / 2].
  forward, back = (
    2 * torch.einsum("dk,ndk->nd", gain * c, powers).real
    for c in torch.view_as_complex(w["C"])
  )
  return forward, back


def _s4d_response(w: Weights, x: Tensor) -> Tensor:
  """Returns the outputs of S4D-LegS in both directions, [b, n, d]."""
  forward, back = _s4d_kernels(w, x.shape[1])
  y = _convolve(x, forward)
  # Shift the backward outputs by one token.
  later = _convolve(x.flip(1), back).flip(1)
  return y + F.pad(later[:, 1:], (0, 0, 0, 1)) + w["D"] * x


def s4d(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes bidirectional S4D-LegS, as its minimal code, with a GLU."""
  return _gated(w, _s4d_response(w, x), "full", "none")


def certified_s4d(w: Weights, x: Tensor, options: Mapping[str, Any]) -> Tensor:
  """Computes S4D-LegS, divided by its gain and followed by a rotation."""
  # Place both kernels on a ring of 2 n; the gain is max |FFT|, at least 1.
  n = options["max_len"]
  forward, back = _s4d_kernels(w, n)
  ring = torch.cat([forward, torch.zeros_like(forward)])
  ring = torch.cat([ring[:1] + w["D"], ring[1 : n + 1], back[: n - 1].flip(0)])
  gain = torch.fft.rfft(ring, dim=0).abs().amax(0)
  y = _s4d_response(w, x) / gain.clamp(min=1)
  return F.elu(w["mixing"][0](y) + w["bias"])


def allpass(w: Weights, x: Tensor, options: Mapping[str, Any]) -> Tensor:
  """Computes all-pass sections in both directions, between two rotations."""
  # Rotate, and pair the channels to complex numbers [b, n, d / 2].
  n = x.shape[1]
  before, after = w["mixing"]
  y = _complex(*before(x).chunk(2, -1))
  logs = _complex(-options["slowest"] - w["decay"].exp(), w["angle"])
  for log, m in zip(logs, options["dilations"], strict=True):
    # Kernel of a section: -conj(lambda) at lag 0, and
    # (1 - |lambda|^2) lambda^k at lag (k + 1) m.
    powers = _powers(log, max(-(-n // m) - 1, 0))
    lags = (1 - (2 * log.real).exp()) * powers
    kernel = torch.zeros(n, len(log), dtype=log.dtype)
    kernel[::m] = torch.cat([-log.conj().exp()[None], lags])
    # Half of the channels run forwards, and the other half backwards.
    (early, late), kernels = y.chunk(2, -1), kernel.chunk(2, -1)
    late = _convolve(late.flip(1), kernels[1]).flip(1)
    y = torch.cat([_convolve(early, kernels[0]), late], -1)
  return F.elu(after(torch.cat([y.real, y.imag], -1)) + w["bias"])


def mega(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes Mega in both directions with softmax and simple biases.

  Args:
    w: weights.
    x: inputs [b, n, d].
    residual: inputs of the residual connection [b, n, d].

  Returns:
    The change that the layer adds to `residual`, [b, n, d].
  """
  # Damped moving average, as convolutions in both directions.
  n, d = x.shape[1:]
  p = torch.sigmoid(w["delta"])
  log = torch.log1p(-p * torch.sigmoid(w["alpha"]))
  weight = p * w["ema_beta"] * w["eta"] / math.sqrt(p.shape[1])
  kernel = torch.einsum("dh,ndh->nd", weight, _powers(log, n))
  y = _convolve(x, kernel[:, :d])
  y = y + _convolve(x.flip(1), kernel[:, d:]).flip(1)
  averaged = F.silu(y + w["omega"] * x)
  # Values, and the parts of the joint projection.
  values = F.silu(w["v_proj"](x))
  z, v = w["gamma"].shape[1], values.shape[-1]
  update, shared, reset, candidate = w["mx_proj"](averaged).split(
    (d, z, v, d), -1
  )
  # Queries and keys share a projection; biases depend on the distance.
  shared = F.silu(shared)
  q, k = (shared * w["gamma"][i] + w["beta"][i] for i in range(2))
  places = torch.arange(n)
  middle = len(w["distance"]) // 2
  bias = w["distance"][places[None] - places[:, None] + middle]
  weights = (q @ k.mT / math.sqrt(z) + bias).softmax(-1)
  # Reset gate, and update gate.
  h = w["h_proj"](F.silu(reset) * (weights @ values))
  return torch.sigmoid(update) * (F.silu(candidate + h) - residual)


def rglru(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes Griffin's recurrent block, token by token."""
  # Branches of the gate and of the recurrence.
  gate = F.gelu(w["gate"](x), approximate="tanh")
  u = matrix_twins.short_convolution(w, w["input"](x))

  # Block-diagonal gates, [b, n, d].
  def by_heads(name: str) -> Tensor:
    h, e, _ = w[name].shape
    y = torch.einsum("bnhe,hef->bnhf", u.unflatten(-1, (h, e)), w[name])
    return torch.sigmoid(y + w[f"{name}_bias"]).flatten(-2)

  remain, enter = by_heads("remain"), by_heads("enter")
  # log a_t = -8 r_t softplus(Lambda), and inputs scaled by sqrt(1 - a_t^2).
  log_a = -8 * remain * F.softplus(w["Lambda"])
  root = (-torch.expm1(2 * log_a)).sqrt()
  root = torch.cat([torch.ones_like(root[:, :1]), root[:, 1:]], 1)
  factor, drive = log_a.exp(), root * enter * u
  # h_t = a_t h_(t-1) + drive_t.
  h, states = torch.zeros_like(u[:, 0]), []
  for t in range(u.shape[1]):
    h = factor[:, t] * h + drive[:, t]
    states.append(h)
  return w["output"](torch.stack(states, 1) * gate)


def mamba(w: Weights, x: Tensor, residual: Tensor) -> Tensor:
  """Computes Mamba by the loop of its reference implementation."""
  # Branches of the recurrence and of the gate, and a short convolution.
  u, z = w["input"](x).chunk(2, -1)
  u = F.silu(matrix_twins.short_convolution(w, u))
  # Step sizes [b, n, d], and the matrices B and C [b, n, N] of each token.
  size = w["A_log"].shape[1]
  gates = w["gates"](u)
  rank = gates.shape[-1] - 2 * size
  step, b, c = gates.split((rank, size, size), -1)
  step = F.softplus(step @ w["step"] + w["step_bias"])
  # h_t = exp(step_t A) h_(t-1) + step_t B_t u_t, and y_t = C_t h_t.
  a = -w["A_log"].exp()
  h, outputs = torch.zeros(*u[:, 0].shape, size), []
  for t in range(u.shape[1]):
    factor = (step[:, t, :, None] * a).exp()
    h = factor * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
    outputs.append((h * c[:, t, None]).sum(-1))
  y = torch.stack(outputs, 1) + w["D"] * u
  return w["output"](y * F.silu(z))


MIXERS: dict[str, Callable[..., Tensor]] = {
  **{f.__name__: f for f in (lru, s5, s4d, mega, rglru, mamba)},
  **matrix_twins.MIXERS,
}


# Mixers of the block "contractive".
CONTRACTIONS = {f.__name__: f for f in (allpass, certified_s4d)}


class Mixer(nn.Module):
  """Recurrent mixer with our weights.

  Args:
    name: name of the mixer in `MIXERS`.
    arrays: parameters of our mixer, as tensors. A linear layer is a mapping
      with a `kernel`, and possibly a `bias`.
    options: options of the mixer that its weights do not show.
  """

  def __init__(
    self, name: str, arrays: Mapping[str, Any], options: Mapping[str, Any]
  ) -> None:
    super().__init__()
    self.mix = functools.partial(MIXERS[name], **options)
    self.learned, self.layers = nn.ParameterDict(), nn.ModuleDict()
    self._add(arrays, "")

  def _add(self, arrays: Mapping[str, Any], prefix: str) -> None:
    """Adds arrays as parameters, and layers under their path."""
    for name, value in arrays.items():
      if not isinstance(value, Mapping):
        self.learned[name] = nn.Parameter(value)
      elif "kernel" in value:
        self.layers[f"{prefix}{name}".replace(".", "-")] = _linear(value)
      else:
        self._add(value, f"{prefix}{name}.")

  def forward(self, x: Tensor, residual: Tensor) -> Tensor:
    """Maps x [b, n, d] -> [b, n, d]; `residual` is x before the norm."""
    # PyTorch allows no dots in the names of modules.
    layers = {k.replace("-", "."): v for k, v in self.layers.items()}
    return self.mix({**self.learned, **layers}, x, residual)


def _linear(weights: Mapping[str, Tensor]) -> nn.Linear:
  kernel = weights["kernel"]
  layer = nn.Linear(*kernel.shape, bias="bias" in weights)
  with torch.no_grad():
    layer.weight.copy_(kernel.T)
    if "bias" in weights:
      layer.bias.copy_(weights["bias"])
  return layer


class RecurrentLayer(nn.Module):
  """Layer around a recurrent mixer: one branch, Mega's layer, or Pre-LN.

  Args:
    name: name of the mixer.
    weights: weights of our layer, as tensors.
    norms: norms of the layer, one or two.
    mlp: first and second linear layer of the feed-forward; () for none.
    options: options of the mixer that its weights do not show.
  """

  def __init__(
    self,
    name: str,
    weights: Mapping[str, Any],
    norms: list[nn.Module],
    mlp: tuple[nn.Module, ...],
    options: Mapping[str, Any],
  ) -> None:
    super().__init__()
    self.mixer = Mixer(name, weights["mixer"], options)
    self.norms, self.mlp = nn.ModuleList(norms), nn.ModuleList(mlp)
    # Mega normalises after the residual sums, and uses SiLU.
    self.norm_first = name != "mega"
    self.activation = F.gelu if self.norm_first else F.silu

  def forward(
    self, x: Tensor, mask: Tensor, first: Tensor | None
  ) -> tuple[Tensor, Tensor]:
    """Maps x [b, n, d]; see `twins.Layer` for the other arguments."""
    x = self._add(0, x, lambda y: self.mixer(y, x))
    if self.mlp:
      up, down = self.mlp
      x = self._add(1, x, lambda y: down(self.activation(up(y))))
    return x, x

  def _add(
    self, index: int, x: Tensor, branch: Callable[[Tensor], Tensor]
  ) -> Tensor:
    """Adds a branch to x, with the norm before or after the sum."""
    norm = self.norms[index]
    return x + branch(norm(x)) if self.norm_first else norm(x + branch(x))
