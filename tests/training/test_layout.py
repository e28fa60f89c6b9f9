"""Meshes: where everything lies, and that numbers do not depend on it."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformers import orthogonal
from jaxformers.foundations import platforms
from jaxformers.models.parallel import on_one_cpu
from jaxformers.training import compilers, layout
from tests.training import examples


@pytest.mark.parametrize(
  ("spec", "want"),
  [
    ("", (4, 1, 1, 1)),
    ("data:4", (4, 1, 1, 1)),
    ("data:2,fsdp:2", (2, 2, 1, 1)),
    ("model:2,data:2", (2, 1, 1, 2)),
    ("model:2,sequence:2", (1, 1, 2, 2)),
    ("fsdp:4", (1, 4, 1, 1)),
  ],
)
def test_layout_of_four_devices_has_the_mesh_of_its_spec(spec, want):
  own = layout.Layout.of(spec, jax.devices())
  assert own.mesh.devices.shape == want
  assert own.mesh.axis_names == ("data", "fsdp", "sequence", "model")
  assert own.parts == want[0] * want[1]
  assert own.splits_batches_alone == (want[0] == 4)


@pytest.mark.parametrize("count", [1, 4])
def test_layout_traced_sets_on_one_cpu(count):
  """Loops over samples would gather a batch that is split over devices."""
  own = layout.Layout.of("", jax.devices()[:count])
  assert own.traced(on_one_cpu)() == (count == 1)


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("data:3", "'data:3'.*3 devices.*4"),
    ("rows:4", "'rows:4'.*data, fsdp, sequence, model"),
    ("data", "config.mesh='data'"),
    ("data:0", "config.mesh='data:0'"),
    ("data:1,data:4", "'data:1,data:4'.*'data' twice"),
  ],
)
def test_sizes_refuses_a_wrong_mesh(spec, message):
  with pytest.raises(ValueError, match=message):
    layout.sizes(spec, 4)


def test_place_batch_splits_tokens_over_the_sequence_axis():
  own = layout.Layout.of("data:2,sequence:2", jax.devices())
  shapes = {"pairs": (4, 2, 6), "ids": (4, 6), "targets": (4,), "odd": (4, 5)}
  shapes["series"] = (4, 6, 3)
  batch = {k: np.zeros(shape, np.int32) for k, shape in shapes.items()}
  batch["series"] = batch["series"].astype(np.float32)
  batch = own.place_batch(batch)
  assert {k: x.sharding.spec for k, x in batch.items()} == {
    "pairs": P(("data", "fsdp"), None, "sequence"),
    "ids": P(("data", "fsdp"), "sequence"),
    "targets": P(("data", "fsdp")),
    "odd": P(("data", "fsdp"), None),
    "series": P(("data", "fsdp"), "sequence", None),
  }
  own.check_lengths((4, 6))
  with pytest.raises(ValueError, match="images of 5 rows.*size of the images"):
    own.check_lengths((0,), (5, 4, 3))
  with pytest.raises(ValueError, match="2 devices.*5 tokens"):
    own.check_lengths((4, 5, 7))


def path(*names):
  return tuple(jax.tree_util.DictKey(name) for name in names)


def test_layout_spec_splits_parameters_by_rule():
  own = layout.Layout.of("fsdp:2,model:2", jax.devices())
  skew = path("layer_0", "mixer", "u_skew")
  assert own.spec(skew, (4, 8, 8)) == P("model", "fsdp", None)
  assert own.spec(skew, (3, 8, 8)) == P(None, "fsdp", None)  # 3 do not divide.
  # One matrix alone is mapped by everybody.
  assert own.spec(path("basis_skew"), (8, 8)) == P("fsdp", None)
  # Hidden units, heads and other kernels.
  for names, shape, want in (
    ("up kernel", (8, 32), P("fsdp", "model")),
    ("up kernel", (8, 3), P("fsdp", None)),
    ("up bias", (32,), P("model")),
    ("down kernel", (32, 8), P("model", "fsdp")),
    ("down bias", (8,), P(None)),
    ("query kernel", (8, 2, 4), P("fsdp", "model", None)),
    ("key bias", (2, 4), P("model", "fsdp")),
    ("out kernel", (2, 4, 8), P("model", None, "fsdp")),
    ("out kernel", (8, 8), P("fsdp", None)),
    ("hidden kernel", (8, 32), P(None, "fsdp")),
  ):
    assert own.spec(path("layer_0", *names.split()), shape) == want
  assert own.spec(path("alpha"), ()) == P()
  # Moments of an optimiser lie where their parameters do.
  assert own.spec(path("mu", *[k.key for k in skew]), (4, 8, 8)) == P(
    "model", "fsdp", None
  )


@functools.cache
def setup(name):
  wiring = {"num_experts": 4} if name == "transject" else {"num_heads": 2}
  return examples.setup(name, "adam", 0.01, mixer=wiring)


@functools.cache
def trained(name, spec, count):
  """Two steps on so many devices under a mesh."""
  _, start, batch, step = setup(name)
  own = layout.Layout.of(spec, jax.devices()[:count])
  step = functools.partial(step, placement=own)
  compiled, place = compilers.compile_step("jit", step, own, state=start)
  now = own.place_state(start)
  for _ in range(2):
    now, sums = compiled(now, place(batch))
  return now, jax.device_get(sums)


def without_key_bias(params):
  """It moves all scores of a query alike: its gradient is what rounding is."""

  def kept(path, leaf):
    names = [one.key for one in path[-2:]]
    return jnp.zeros(()) if names == ["key", "bias"] else leaf

  return jax.tree_util.tree_map_with_path(kept, jax.device_get(params))


@pytest.mark.parametrize(
  ("name", "spec"),
  [
    ("transject", "sequence:2,model:2"),
    ("transject", "fsdp:2,model:2"),
    pytest.param("transformer", "fsdp:2,model:2", marks=pytest.mark.long),
  ],
)
@pytest.mark.slow
def test_training_does_not_depend_on_the_mesh(name, spec):
  alone, sums = trained(name, "", 1)
  spread, others = trained(name, spec, 4)
  chex.assert_trees_all_close(sums, others, rtol=1e-5)
  chex.assert_trees_all_close(
    *map(without_key_bias, (alone.params, spread.params)), atol=2e-4
  )
  # And every device has its share alone, of the optimiser's moments as well.
  for tree in (spread.params, spread.opt_state):
    kept = sum(
      leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree)
    )
    whole = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert kept < (0.4 if "fsdp" in spec else 0.8) * whole


@pytest.mark.slow
def test_place_state_splits_rotations_over_devices():
  _, start, _, _ = setup("transject")
  own = layout.Layout.of("data:2,model:2", jax.devices())
  params = own.place_state(start.params)
  found = jax.jit(
    functools.partial(
      own.rotations, orthogonal_map="cayley", in_turn=frozenset()
    )
  )(params)
  want = orthogonal.rotations(start.params, "cayley")
  chex.assert_trees_all_close(
    jax.device_get(found), jax.device_get(want), atol=1e-6
  )
  u = found["encoder"]["layer_0"]["mixer"]["u_skew"]
  assert u.addressable_shards[0].data.shape == (2, 8, 8)
  # Seven matrices over two devices: the eighth is nobody's.
  odd = {"u_skew": jnp.asarray(np.random.default_rng(0).normal(size=(7, 4, 4)))}
  chex.assert_trees_all_close(
    jax.jit(
      functools.partial(
        own.rotations, orthogonal_map="cayley", in_turn=frozenset()
      )
    )(odd),
    orthogonal.rotations(odd, "cayley"),
    atol=1e-6,
  )


def shares(monkeypatch, processes, each, model):
  """What every process reads, with so many devices each."""
  devices = np.array(
    [
      types.SimpleNamespace(process_index=k // each)
      for k in range(processes * each)
    ]
  ).reshape(-1, 1, 1, model)
  sizes = dict(zip(layout.AXES, devices.shape, strict=True))
  size = devices.size
  mesh = types.SimpleNamespace(devices=devices, shape=sizes, size=size)
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  found = []
  for k in range(processes):
    monkeypatch.setattr(jax, "process_index", lambda k=k: k)
    found.append(layout.Layout(mesh).share)
  return found


@pytest.mark.parametrize(
  ("processes", "each", "model", "want"),
  [
    (1, 4, 2, [(0, 1)]),
    (2, 2, 1, [(0, 2), (1, 2)]),
    (2, 4, 2, [(0, 2), (1, 2)]),
    (4, 1, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    (2, 2, 4, [(0, 1), (0, 1)]),
  ],
)
def test_process_share_is_the_rows_of_its_devices(
  monkeypatch, processes, each, model, want
):
  assert shares(monkeypatch, processes, each, model) == want


@pytest.mark.parametrize(
  ("processes", "each", "model"), [(3, 4, 3), (3, 8, 6), (4, 6, 4), (8, 6, 8)]
)
def test_process_share_refuses_rows_cut_between_processes(
  monkeypatch, processes, each, model
):
  with pytest.raises(ValueError, match=r"'model': \d.*process \d"):
    shares(monkeypatch, processes, each, model)


def test_traced_steps_see_the_device_of_the_mesh():
  seen = []
  for device in (jax.devices()[0], types.SimpleNamespace(platform="tpu")):
    mesh = types.SimpleNamespace(size=1, devices=np.array([device]))
    layout.Layout(mesh).traced(lambda: seen.append(platforms.backend()))()
  assert seen == ["cpu", "tpu"]
  assert platforms.backend() == "cpu"
