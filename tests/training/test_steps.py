import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import orthogonal
from jaxformers.models.bounds import nearest_wrong
from jaxformers.models.variables import make_variables
from jaxformers.training import compilers, losses, steps
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer
from tests.marks import long_except
from tests.training import examples

# One for each block and for a loop inside; not those that draw in every part.
NAMES = (
  "random_transject",
  "sparse",
  "transformer",
  "transformer_rezero",
  "transject",
)
SOME = long_except(("transject",), NAMES)


def setup(name="transject", **options):
  return make(name, **options) if options else plain(name)


@functools.cache  # What one test compiles, the others find compiled.
def plain(name):
  return make(name)


@functools.cache
def compiled(step):
  """The program of a step, which several tests run."""
  return jax.jit(step)


def make(name, **options):
  return examples.setup(name, "sgd", 0.1, **options)


def test_train_step_gradient_is_that_of_the_mean_loss_with_maps_inside():
  """Maps made once and pulled back equal maps inside the model."""
  model, start, batch, step = setup()

  def loss(params):
    logits, sown = model.apply(
      {"params": params}, batch["inputs"], train=False, mutable=["losses"]
    )
    total, _ = losses.classification(logits, batch, losses.sown_losses(sown, 8))
    return total / 8

  grads = jax.jit(jax.grad(loss))(start.params)
  after, sums = compiled(step)(start, batch)
  want = jax.tree.map(lambda p, g: p - 0.1 * g, start.params, grads)
  chex.assert_trees_all_close(after.params, want, atol=1e-5)
  assert after.step == 1
  assert sums["count"] == 8


@pytest.mark.parametrize("name", SOME)
@pytest.mark.slow
def test_train_step_accumulation_equals_the_whole_batch(name):
  _, start, batch, step = setup(name)
  one, sums = compiled(step)(start, batch)
  for parts in (2, 4):
    many, others = jax.jit(functools.partial(step, accumulate=parts))(
      start, batch
    )
    chex.assert_trees_all_close(one.params, many.params, atol=1e-5)
    chex.assert_trees_all_close(sums, others, rtol=1e-5)


@pytest.mark.slow
def test_train_step_parts_stay_on_their_devices():
  """Every device works on its own rows of every part, and only sums travel."""
  _, start, batch, step = setup()
  step = functools.partial(step, accumulate=2)
  layout = compilers.layout()
  run, place = compilers.compile_step("jit", step, layout, state=start)
  text = run.lower(layout.place_state(start), place(batch)).compile()
  text = text.as_text()
  assert "all-reduce" in text
  assert "all-gather" not in text
  assert "all-to-all" not in text


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", SOME)
@pytest.mark.slow
def test_train_step_under_jit_and_pmap_agrees_on_four_devices(name):
  _, start, batch, step = setup(name)
  results = []
  for mode in ("jit", "pmap"):
    layout = compilers.layout()
    run, place = compilers.compile_step(mode, step, layout, state=start)
    now = layout.place_state(start)
    for _ in range(3):
      now, sums = run(now, place(batch))
    results.append(jax.device_get((now, sums)))
  (a, sums_a), (b, sums_b) = results
  chex.assert_trees_all_close(sums_a, sums_b, rtol=1e-5)
  chex.assert_trees_all_close(a.params, b.params, atol=1e-4)
  assert a.step == b.step == 3


@pytest.mark.slow
@pytest.mark.long
def test_train_step_of_token_labels_does_not_depend_on_devices_and_parts():
  """Rows have different numbers of labels, and one row has none."""
  options = {"objective": "token_classification", "causal": True}
  _, start, batch, step = setup("linear_transformer", **options)
  rng = np.random.default_rng(1)
  targets = rng.integers(0, 3, (8, 10)).astype(np.int32)
  weights = (np.arange(10) < np.arange(8)[:, None]).astype(np.float32)
  batch |= {"targets": targets, "weights": weights}
  alone, sums = jax.jit(step)(start, batch)
  assert (sums["count"], sums["sequences"]) == (28, 7)
  for mode, parts in (("jit", 2), ("pmap", 1)):
    layout = compilers.layout()
    run, place = compilers.compile_step(
      mode, functools.partial(step, accumulate=parts), layout, state=start
    )
    now, others = jax.device_get(run(layout.place_state(start), place(batch)))
    chex.assert_trees_all_close(others, jax.device_get(sums), rtol=1e-5)
    chex.assert_trees_all_close(
      now.params, jax.device_get(alone.params), atol=1e-5
    )


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
  "name", long_except(("transformer",), ("transformer", "s5", "mega"))
)
@pytest.mark.long
def test_train_step_batch_norm_is_over_all_devices(name):
  """One device, four under jit, and four under pmap; and parts add up."""
  block = {"norm_type": "batch", "norm_first": True}
  _, start, batch, step = setup(name, block=block)
  after, sums = jax.jit(step)(start, batch)
  assert "statistics" not in sums
  for mode in ("jit", "pmap"):
    run, place = compilers.compile_step(
      mode, step, compilers.layout(), state=start
    )
    many, _ = run(compilers.layout().place_state(start), place(batch))
    chex.assert_trees_all_close(
      after.params, jax.device_get(many.params), atol=1e-4
    )
  # The first norm sees the same tokens in two parts, and adds their sums.
  parts, _ = jax.jit(functools.partial(step, accumulate=2))(start, batch)
  first = "norm" if name == "s5" else "norm_mixer"
  whole, halves, before = (
    {
      key: state.params["encoder"]["layer_0"][first][key]
      for key in ("running_mean", "running_variance")
    }
    for state in (after, parts, start)
  )
  chex.assert_trees_all_close(whole, halves, rtol=1e-4, atol=1e-6)
  for key in whole:
    assert jnp.abs(whole[key] - before[key]).max() > 1e-4


@pytest.mark.slow
def test_train_step_margin_is_minimised_and_not_reported():
  """The reported loss is that without replacement; the gradient has a share."""
  model, start, batch, step = setup("isometric")

  def loss(params, weight):
    variables = make_variables(model, params)
    logits = model.apply(variables, batch["inputs"], train=False)
    raised = nearest_wrong(
      model, variables, logits, batch["inputs"], batch["targets"], 2
    )
    extra = jnp.zeros(8)
    plain, robust = (
      losses.classification(z, batch, extra)[0] for z in (logits, raised)
    )
    return ((1 - weight) * plain + weight * robust) / 8, (plain, robust)

  plain, robust = jax.jit(loss)(start.params, 1.0)[1]
  assert robust > plain + 1
  margin = steps.Margin(tokens=2, weight=0.25)
  after, sums = jax.jit(functools.partial(step, margin=margin))(start, batch)
  grads = jax.jit(jax.grad(loss, has_aux=True))(start.params, 0.25)[0]
  want = jax.tree.map(lambda p, g: p - 0.1 * g, start.params, grads)
  chex.assert_trees_all_close(after.params, want, atol=1e-5)
  np.testing.assert_allclose(sums["loss"], plain, rtol=1e-5)
  share = 0.75 * plain + 0.25 * robust
  np.testing.assert_allclose(sums["objective"], share, rtol=1e-5)


def test_certified_losses_follow_their_papers():
  """Worked examples, two of which a wrong form of EMMA fails.

  The first example has the logits 3 and 1 and a margin of 0.5 at stake, which
  it has; the second has a margin of 1 of 4; the third is wrong by 2.
  """
  logits = jnp.array([[3.0, 1.0], [2.0, 1.0], [0.0, 2.0]])
  raised = logits + jnp.array([[0.0, 0.5], [0.0, 4.0], [0.0, 4.0]])
  targets = jnp.array([0, 0, 0])

  def loss(form, raised=raised):
    return np.asarray(steps.certified_loss(logits, raised, targets, form))

  def entropy(gap):
    return np.log1p(np.exp(gap))

  np.testing.assert_allclose(
    loss("fixed"), entropy(np.array([-1.5, 3, 6])), rtol=1e-5
  )
  np.testing.assert_allclose(
    loss("emma"), entropy(np.array([-1.5, 0, 2.04])), rtol=1e-5
  )
  p = 1 / (1 + np.exp(np.array([-1.5, 3, 6]) / 0.75))
  np.testing.assert_allclose(
    loss("annealed"), -0.75 * (1 - p) ** 5 * np.log(p), rtol=1e-4
  )
  # The share of EMMA has no gradient, so that a greater bound costs at once.
  by_bound = jax.grad(
    lambda x: steps.certified_loss(logits, x, targets, "emma").sum()
  )(raised)
  np.testing.assert_allclose(by_bound[1, 1], 0.25 * 0.5, rtol=1e-5)
  assert np.isfinite(np.asarray(by_bound)).all()


def test_train_step_ignores_examples_of_weight_zero():
  _, start, batch, step = setup()
  less = {key: value[:5] for key, value in batch.items()}
  padded = dict(batch, weights=np.array([1] * 5 + [0] * 3, np.float32))
  a, sums_a = compiled(step)(start, less)
  b, sums_b = compiled(step)(start, padded)
  chex.assert_trees_all_close(a.params, b.params, atol=1e-6)
  chex.assert_trees_all_close(sums_a, sums_b, rtol=1e-6)


@pytest.mark.slow
def test_train_step_does_not_recompile():
  _, start, batch, step = setup()
  chex.clear_trace_counter()
  counted = chex.assert_max_traces(lambda s, b: step(s, b), n=1)
  run = jax.jit(counted)
  for _ in range(3):
    start, _ = run(start, batch)


@pytest.mark.slow
def test_train_step_dropout_is_a_function_of_seed_and_step():
  _, start, batch, step = setup(
    "transformer", mixer={"dropout_rate": 0.5}, block={"dropout_rate": 0.5}
  )
  other = jax.jit(functools.partial(step, seed=1))
  step = jax.jit(step)
  a, b = step(start, batch), step(start, batch)
  chex.assert_trees_all_equal(a, b)
  later = start.replace(step=start.step + 1)
  assert step(later, batch)[1]["loss"] != a[1]["loss"]
  assert other(start, batch)[1]["loss"] != a[1]["loss"]


@pytest.mark.slow
def test_eval_step_accepts_ready_rotations():
  model, start, batch, _ = setup()
  rotations = orthogonal.rotations(start.params, "cayley")
  evaluate = jax.jit(functools.partial(steps.eval_step, model=model))
  direct = evaluate({"params": start.params}, batch)
  made = evaluate({"params": start.params, "rotations": rotations}, batch)
  chex.assert_trees_all_close(direct, made, rtol=1e-6)
  assert direct["count"] == 8
  assert 0 <= direct["correct"] <= 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_train_step_keeps_matrices_orthogonal(dtype):
  _, start, batch, step = setup(dtype=dtype)
  for _ in range(30):
    start, _ = compiled(step)(start, batch)
  for q in jax.tree.leaves(orthogonal.rotations(start.params, "cayley")):
    assert float(orthogonal.orthogonality_defect(q).max()) <= 5e-6
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(start.params))


@pytest.mark.slow
def test_train_step_average_of_parameters_decays_exponentially(smoke, tmp_path):
  trainer = Trainer(open_run(smoke(ema_decay=0.9), tmp_path))
  want = jax.device_get(trainer.state.params)
  chex.assert_trees_all_equal(trainer.state.average, want)
  for _, batch in zip(range(3), trainer.batches(0), strict=False):
    trainer.state, _ = trainer.train_step(trainer.state, batch)
    want = jax.tree.map(
      lambda a, p: 0.9 * a + 0.1 * p, want, trainer.state.params
    )
  chex.assert_trees_all_close(trainer.state.average, want, atol=1e-6)
  assert trainer.state.scored is trainer.state.average
