"""Calls of our models to time, and sizes that PyTorch's models share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.timing import Call, ready
from jaxformers import models
from jaxformers.config import Choice
from jaxformers.models import Model
from jaxformers.models.variables import make_variables
from jaxformers.training import compilers, optim, state, steps
from jaxformers.training.layout import Layout, placed_shapes

# Sizes of TransJect: number of layers, of experts, and width.
LAYERS, EXPERTS, D = 2, 4, 512
VOCABULARY, CLASSES = 257, 2
LEARNING_RATE = 1e-4  # Its value has no effect on the time.


def random_ids(batch: int, length: int) -> np.ndarray:
  """Returns random ids [batch, length] without padding."""
  rng = np.random.default_rng(0)
  return rng.integers(1, VOCABULARY, (batch, length)).astype(np.int32)


def build(name: str, length: int, **options: Any) -> Model:
  """Builds a classifier; the default options are TransJect's sizes above."""
  if not options:
    options = {"num_layers": LAYERS, "mixer": {"num_experts": EXPERTS}}
  sizes = {"vocab_size": VOCABULARY, "num_classes": CLASSES, "d_model": D}
  return models.build(name, max_len=length, **sizes | options)


def make_batch(batch: int, length: int) -> dict[str, np.ndarray]:
  """Returns a batch in the form of the loader's batches."""
  return {
    "inputs": random_ids(batch, length),
    "targets": np.zeros(batch, np.int32),
    "weights": np.ones(batch, np.float32),
  }


def make_step(model: Model, accumulate: int) -> Any:
  """Builds a train step to compile.

  Args:
    model: result of `build`.
    accumulate: number of microbatches.

  Returns:
    The step, its layout, and a function that creates the initial state.
  """
  options = {"learning_rate": LEARNING_RATE}
  rate = Choice(name="constant", options=options)
  tx, _ = optim.build_optimizer(Choice(name="adam"), rate, 10)
  step = functools.partial(
    steps.train_step, model=model, tx=tx, seed=0, accumulate=accumulate
  )
  layout = Layout.of("", jax.devices()[:1])
  return step, layout, functools.partial(state.create, model, tx, 0)


def train(model: Model, batch: int, length: int, accumulate: int = 0) -> Call:
  """Returns a call that trains for one step.

  Args:
    model: result of `build`.
    batch: number of rows of a batch.
    length: number of tokens per row.
    accumulate: number of microbatches; 0 for one row per microbatch.
  """
  step, layout, create = make_step(model, accumulate or batch)
  # Each call continues from the state that the previous call returned.
  current = layout.place_state(create())
  run, place = compilers.compile_jit(step, layout, state=current, donate=True)
  rows = place(make_batch(batch, length))

  def call() -> None:
    nonlocal current
    current, sums = run(current, rows)
    jax.block_until_ready((current, sums))

  return call


def infer(model: Model, batch: int, length: int) -> Call:
  """Returns a call of the forward pass with precomputed orthogonal matrices."""
  inputs = jnp.asarray(random_ids(batch, length))
  # Two tokens suffice for the shapes of parameters.
  params = draw_params(model, inputs[:1, :2])
  # Compute the orthogonal matrices once, as an evaluation does.
  variables = jax.jit(functools.partial(make_variables, model))(params)
  run = jax.jit(functools.partial(model.apply, train=False))
  return ready(run, variables, inputs)


def draw_params(model: Model, inputs: jax.Array) -> Any:
  """Draws initial parameters of a model in one compiled program."""
  init = jax.jit(functools.partial(model.init, train=False))
  return init(jax.random.key(0), inputs)["params"]


def compile_on_shapes(
  step: Any, layout: Layout, create: Call, batch: int, length: int
) -> Any:
  """Compiles a train step without allocating arrays.

  Args:
    step, layout, create: results of `make_step`.
    batch: number of rows of a batch.
    length: number of tokens per row.
  """
  # Shapes of the state and of a batch.
  initial = jax.eval_shape(create)
  rows = {
    "inputs": jax.ShapeDtypeStruct((batch, length), np.int32),
    "targets": jax.ShapeDtypeStruct((batch,), np.int32),
    "weights": jax.ShapeDtypeStruct((batch,), np.float32),
  }
  # Compile the step for these shapes, placed on the devices of the layout.
  run, _ = compilers.compile_jit(step, layout, state=initial, donate=True)
  placed = placed_shapes(rows, layout.batch_sharding(rows))
  return run.lower(initial, placed).compile()


def planned_bytes(
  model: Model, batch: int, length: int, accumulate: int = 1
) -> int:
  """Returns the bytes that the compiler plans for a step besides its state."""
  program = compile_on_shapes(*make_step(model, accumulate), batch, length)
  return program.memory_analysis().temp_size_in_bytes


class Program(NamedTuple):
  """Call of a compiled program, and the scratch memory of the program."""

  call: Call
  planned_bytes: int


Programs = dict[str, Program]


def compile_passes(model: Model, inputs: jax.Array, *, train: bool) -> Programs:
  """Compiles a forward pass, and a plain train step without the trainer.

  The step is forward, backward and Adam. Both programs take the parameters, so
  that they also compute the orthogonal matrices, and the batch, so that they
  compute its mask.

  Args:
    model: classifier.
    inputs: batch of inputs. All labels are class 0.
    train: True to use dropout in the train step.

  Returns:
    The programs "forward" and "step".
  """
  # Draw the parameters, and define both functions.
  params = draw_params(model, model.example())
  labels = jnp.zeros(len(inputs), jnp.int32)
  tx = optax.adam(LEARNING_RATE)

  def forward(params: Any, inputs: jax.Array) -> jax.Array:
    return model.apply({"params": params}, inputs, train=False)

  def loss(params: Any, key: jax.Array, inputs: Any, labels: Any) -> jax.Array:
    rngs = {"random": key} if train else None
    logits = model.apply({"params": params}, inputs, train=train, rngs=rngs)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels).mean()

  def step(params: Any, moments: Any, key: jax.Array, *batch: Any) -> Any:
    grads = jax.grad(loss)(params, key, *batch)
    updates, moments = tx.update(grads, moments)
    return optax.apply_updates(params, updates), moments

  # Compile both functions; the calls wait for their results.
  programs = {}
  for function, args in (
    (forward, (params, inputs)),
    (step, (params, tx.init(params), jax.random.key(1), inputs, labels)),
  ):
    compiled = jax.jit(function).lower(*args).compile()
    num_bytes = compiled.memory_analysis().temp_size_in_bytes
    programs[function.__name__] = Program(ready(compiled, *args), num_bytes)
  return programs
