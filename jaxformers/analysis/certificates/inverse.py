r"""TransJect run backwards: from any layer to the tokens that it came from.

python -m jaxformers inverse runs/listops

A layer is injective once its gate's weights and Sigma are known (theorem 2 of
the paper; docs/theory.md). They are the side information that a forward pass
gives, `num_layers` times `num_experts` and d numbers a sample.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import cli, trained
from jaxformers.analysis.tokens.capture import capture
from jaxformers.errors import UserError
from jaxformers.models import Classifier, in_float32, reversible
from jaxformers.models.variables import make_variables

MAX_STEPS = 2_000  # a = 0.99 needs 1,600 in float32.


class Side(NamedTuple):
  """What is needed beside a layer's output to undo it.

  Attributes:
    mask: [b, n], True at tokens.
    gates: the weights of the experts, float32 [l, b, e].
    sigma: float32 [b, d], or [1, d] if shared.
  """

  mask: jax.Array
  gates: jax.Array
  sigma: jax.Array


def forward(
  model: Classifier, params: Any, ids: jax.Array
) -> tuple[tuple[jax.Array, ...], Side]:
  """The embedded tokens and all layers' outputs, with the side information.

  Args:
    model: TransJect or Random-TransJect, from `models.build`.
    params: its parameters.
    ids: [b, n], or [b, 2, n] for pairs.

  Raises:
    UserError: for another model, or one that computes in half precision.
  """
  form_of(model)
  found = capture(model, make_variables(model, params), ids)
  return found.hidden, Side(found.mask, found.gates, found.sigma)


def rates(
  layer: reversible.Layer, sigma: Any, form: reversible.Form
) -> tuple[float, float]:
  """Lipschitz constants of a layer's two branches, from its actual weights.

  a max_e |U_e| |Sigma| |V_e| for the mixture with its weights given (a / c
  with the certified gate), and a |W_1| |W_2| for the feed-forward, by float64
  singular values.

  Args:
    layer: of `reversible.layers`.
    sigma: [b, d] or [1, d].
    form: of the layers.
  """
  norms = [
    np.linalg.norm(np.asarray(m, np.float64), 2, (-2, -1))
    for m in (layer.experts.u, layer.experts.v, layer.w)
  ]
  a, mixing = float(layer.experts.a), float(reversible.mixing_rate(layer, form))
  largest = float(np.abs(np.asarray(sigma, np.float64)).max())
  return mixing * largest * float((norms[0] * norms[1]).max()), a * float(
    norms[2].prod()
  )


def inverse(
  model: Classifier,
  params: Any,
  y: jax.Array,
  side: Side,
  *,
  layer: int | None = None,
  max_steps: int = MAX_STEPS,
) -> jax.Array:
  """The embedded tokens from the output of a layer.

  Args:
    model, params: as for `forward`.
    y: float32 [b, n, d], what came out of layer `layer`.
    side: from `forward`.
    layer: counted from 1; the last if None.
    max_steps: of the iteration that undoes half a layer.

  Returns:
    float32 [b, n, d], as accurate as y: relative errors grow by at most
    (1 - a)^-2 a layer.

  Raises:
    UserError: if a layer does not contract enough to be undone in max_steps,
      or what was found does not come back to y, as from values that are not
      finite.
  """
  form = form_of(model)
  encoder = make_variables(model, params)
  encoder = {kind: tree["encoder"] for kind, tree in encoder.items()}
  layers = reversible.layers(encoder, form)
  top = form.num_layers if layer is None else layer
  if not 1 <= top <= form.num_layers:
    raise UserError(f"layer={layer}: choose one of 1 to {form.num_layers}.")
  undo, again = _compiled(form, max_steps)
  for i in reversed(range(top)):
    bounds = rates(layers[i], side.sigma, form)
    _check_contraction(i, bounds, max_steps, jnp.finfo(y.dtype).eps)
    # Parameters may be rounded beyond what was measured in float64.
    own = tuple(jnp.asarray(min(bound, 1 - 1e-7), y.dtype) for bound in bounds)
    args = (layers[i], side.sigma, side.mask)
    x, _ = undo(y, *args, side.gates[i], rates=own)
    back, _ = again(x, *args, weights=side.gates[i])
    off = float(jnp.abs(back - y).max()) / float(jnp.abs(y).max() + 1e-30)
    if not off < 100 * float(jnp.finfo(y.dtype).eps):
      raise UserError(
        f"Layer {i + 1} could not be undone: what was found comes back to y "
        f"only to {off:.1g} of its greatest entry. Give finite values and "
        "parameters."
      )
    y = x
  return y


def _check_contraction(
  i: int, bounds: tuple[float, float], max_steps: int, eps: float
) -> None:
  for what, bound in zip(("mixture", "feed-forward"), bounds, strict=True):
    needed = math.inf
    if bound < 1:
      needed = math.log(eps) / math.log(max(bound, eps))
    if needed > max_steps:
      raise UserError(
        f"The {what} of layer {i + 1} contracts too weakly to be undone: its "
        f"Lipschitz constant is {bound:.6g}, which needs {needed:.4g} steps, "
        f"more than max_steps={max_steps}. A constant below 1 can be undone "
        "with more; at 1 and above no inverse is guaranteed (more layers make "
        "alpha / L smaller)."
      )


def tokens(
  model: Classifier, params: Any, x: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
  """Which token and which position are nearest to every embedded one.

  Half of the channels are the token's and half the position's (TransJect,
  section 4.4).

  Args:
    model, params: as for `forward`.
    x: [b, n, d], embedded tokens, such as `inverse` returns.

  Returns:
    int32 [b, n] ids, or for real-valued inputs float32 [b, n] values; and
    int32 [b, n] positions. Without the token that an encoder puts in front.
  """
  form_of(model)
  encoder = model.encoder(parent=None)
  own = {"params": params["encoder"]["embedding"]}
  half = x.shape[-1] // 2
  embedding = encoder.embedding(concatenate=True)
  if model.image or embedding.cutoffs or embedding.norm_epsilon:
    raise UserError(
      "Only ids and real numbers are read back from an embedding, not patches, "
      "adaptive tables or what a LayerNorm has changed: take `inverse` alone."
    )
  first = int(model.cls)  # The token in front has no id.
  dtype = jnp.float32 if model.real else jnp.int32
  blank = jnp.zeros((1, x.shape[1] - first), dtype)
  places = np.asarray(embedding.apply(own, blank))[0, first:, half:]
  x = np.asarray(x)[:, first:]
  positions = _nearest(x[..., half:], places)
  if model.real:
    kernel, bias = (
      np.asarray(own["params"]["values"][k]) for k in ("kernel", "bias")
    )
    direction = kernel[0] / np.square(kernel[0]).sum()
    return (x[..., :half] - bias) @ direction, positions
  table = np.asarray(own["params"]["tokens"]["embedding"])
  return _nearest(x[..., :half], table * embedding.scale), positions


def _nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
  """The row of a table [r, c] nearest to each of x [b, n, c] -> int32."""
  table = np.asarray(table, np.float64)
  lengths = np.square(table).sum(1)
  return np.stack(
    [
      (lengths - 2 * np.asarray(one, np.float64) @ table.T).argmin(1)
      for one in x
    ]
  ).astype(np.int32)


def form_of(model: Classifier) -> reversible.Form:
  """The form of a model's layers, for what is said of them in float32.

  Raises:
    UserError: for a model whose layers are not TransJect's, or that computes
      in half precision, whose rounding is no Lipschitz function.
  """
  form = reversible.form(model.encoder(parent=None).block(parent=None))
  if form.dtype == jnp.bfloat16:
    raise UserError(
      "The model computes in bfloat16, which rounds tokens before each branch: "
      "what is guaranteed, and what can be undone, is the same model in "
      "float32. Give `models.in_float32(model)`."
    )
  return form


@functools.cache
def _compiled(form: reversible.Form, max_steps: int) -> tuple[Any, Any]:
  undo = functools.partial(reversible.undo, form=form, max_steps=max_steps)
  return jax.jit(undo), jax.jit(functools.partial(reversible.apply, form=form))


@cli.command(
  cli.WORKDIR,
  cli.argument(
    "--samples", type=int, default=32, help="number of test samples"
  ),
  cli.argument(
    "--length", type=int, default=512, help="most tokens of a sample"
  ),
)
def main(workdir: str, samples: int, length: int) -> None:
  """Prints how much of some test samples comes back from the last layer."""
  run = trained.load(workdir)
  ids = jnp.asarray(run.sample(samples, length))
  model = in_float32(run.model)
  hidden, side = forward(model, run.params, ids)
  x = inverse(model, run.params, hidden[-1], side)
  recovered, positions = tokens(model, run.params, x)
  mask = np.asarray(model.mask(ids))[:, int(model.cls) :]
  ids = np.asarray(ids).reshape(mask.shape)
  right = np.isclose(recovered, ids, atol=1e-4)[mask].mean()
  placed = (positions == np.arange(mask.shape[1]))[mask].mean()
  off = float(jnp.abs(x - hidden[0]).max())
  print(
    f"{mask.sum()} tokens of {len(ids)} examples, through "
    f"{len(hidden) - 1} layers and back: {right:.4%} of the tokens and "
    f"{placed:.4%} of their positions recovered; greatest error of the "
    f"embedding {off:.2g}."
  )


if __name__ == "__main__":
  main()
