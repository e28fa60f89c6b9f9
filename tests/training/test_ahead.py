"""Steps of a config, compiled for TPUs that this machine does not have."""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from jaxformers import config as configs
from jaxformers.config import RunConfig
from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.models import MODELS
from jaxformers.models.dropout import Dropout
from jaxformers.models.isometric import ring
from jaxformers.models.mixers import convolution
from jaxformers.scan import linear_scan
from jaxformers.training import programs, topologies
from jaxformers.training.ahead import Ahead, Report, batch_shapes
from jaxformers.training.evaluate import Evaluator
from jaxformers.training.layout import Layout, placed_shapes
from jaxformers.training.memory import TooLargeError
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer
from tests.marks import long_except

NO_LIBTPU = importlib.util.find_spec("libtpu") is None
SIZES = {"vocab_size": 18, "max_len": 64, "num_classes": 10}
CHIP = topologies.CHIPS["v5e"]
TINY = (
  "--config.model.d_model=16",
  "--config.model.num_layers=1",
  "--config.batch_size=8",
  "--config.eval_batch_size=8",
)
NO_CUDA = importlib.util.find_spec("jax_cuda13_plugin") is None
# Models with a kernel: the inverse of orthogonal maps, or a scan over tokens.
WITH_KERNEL = (
  "transject",
  "random_transject",
  "transformer_orthogonal",
  "isometric",
  "allpass",
  "certified_s4d",
  "mamba",
  "rglru",
  "lru",
  "s5",
  "mingru",
  "linoss",
  "damped_linoss",
)
# One model of each kind, or two; --long has all others.
KINDS = (
  "isometric",  # Injective encoders.
  "transject",
  "linformer",  # Efficient attention.
  "mamba",  # Recurrences, with factors that depend on tokens and without.
  "s5",
  "mega",  # Convolution and attention.
  "transformer",
)
# A product in a program for TPUs, without the precision of one pass.
PRODUCT = re.compile(r"= f32\S* (?:convolution|dot)\((?!.*operand_precision)")


def load(model, *overrides):
  spec = f"lra/listops:size=tiny,model={model}"
  return RunConfig.from_dict(configs.load_with(spec, [*TINY, *overrides]))


def make(model, *overrides, chip=CHIP, sizes=SIZES):
  devices = topologies.describe_devices("v5e:2x2")
  return Ahead(load(model, *overrides), devices, chip, sizes)


@pytest.fixture
def texts(monkeypatch):
  """The texts of the programs that a test compiles."""
  kept, count = [], programs.count

  def keep(text, devices):
    kept.append(text)
    return count(text, devices)

  monkeypatch.setattr(programs, "count", keep)
  return kept


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.parametrize("model", long_except(KINDS, MODELS))
@pytest.mark.usefixtures("optimized")
def test_a_train_step_for_tpus_sends_one_all_reduce(model, texts):
  """It holds the gradient and the sums of the scores, and nothing else is sent.

  No product of an orthogonal map, a Fourier transform or a kernel of powers is
  a single pass of bfloat16.
  """
  # Some models need a greater length than SIZES has.
  report = make(model, sizes=SIZES | {"max_len": 256}).train()
  assert report.devices == 4
  assert 0 < report.total < report.available == 15.75
  assert report.compiler_ms > 0
  # The highest precision takes six passes.
  passes = report.tflop + 5 * report.precise
  assert report.compute_ms == pytest.approx(1e3 * passes / 197)
  assert 0 <= report.precise < report.tflop
  if model in ("transject", "isometric"):
    assert report.precise
  sent = [(each.kind, each.count) for each in report.collectives]
  assert sent == [("all-reduce", 1)]
  assert ("pallas_call" in texts[0]) == (model in WITH_KERNEL)
  # Maxima over the tokens are not read by their positions.
  if model in ("transject", "random_transject"):
    assert "slice_sizes={1,1,1}" not in texts[0]
  products = [line for line in texts[0].splitlines() if PRODUCT.search(line)]
  assert products  # Those of tokens and weights.
  for line in products:
    name = re.search(r'op_name="([^"]*)"', line)[1]
    is_of_tokens = re.search(r"/(encoder|head|embedding)\b", name)
    assert is_of_tokens, name
    assert not re.search("fft|_kernels|_sigma|_share", name), name


def share_of_copies(text):
  """Share of the bytes of a program whose instructions only copy numbers.

  Copies to another memory in the same layout hide behind other instructions
  and do not count.
  """
  entry, computations = programs.parse(text)
  reader = programs._Reader(computations, {})
  moving = {"copy", "transpose", "slice", "concatenate", "gather", "reverse"}
  passing = moving | {"parameter", "bitcast", "reshape", "tuple", "constant"}
  total = copied = 0
  for name in computations:
    # The instructions of the entry and of loops, and not those of fusions.
    if name != entry and "region" not in name:
      continue
    for each in computations[name].values():
      size = reader._bytes(each)
      total += size
      kinds = {part.kind for part in reader._called(each).values()}
      kinds = kinds or {each.kind}
      # The same order of axes and no fusion: to another memory.
      orders = {
        re.search(r"\{([\d,]*)", x.shape)[1] for x in (each, *each.sources)
      }
      is_far = each.kind in moving and len(orders) == 1
      if kinds & moving and kinds <= passing and not is_far:
        copied += size
  return copied / total


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.parametrize("model", ["s5", "lru", "linoss"])
@pytest.mark.usefixtures("optimized")
def test_recurrences_on_tpus_copy_little(model, texts):
  """Kernels read narrow states with the steps last, as products write them."""
  wide = ["--config.model.d_model=64", "--config.batch_size=256"]
  make(model, *wide, sizes=SIZES | {"max_len": 1_024}).train()
  assert share_of_copies(texts[0]) < 0.02


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.parametrize(("model", "count"), [("transformer", 4), ("s5", 0)])
@pytest.mark.usefixtures("optimized")
def test_heads_and_hidden_units_on_several_tpus_send_sums_of_tokens(
  model, count, texts
):
  """A branch sends one in each pass, and nothing is sent without them."""
  overrides = ["--config.mesh=model:4"]
  if model == "transformer":
    overrides.append("--config.model.mixer.num_heads=4")
  sent = make(model, *overrides).train().collectives
  assert sum(each.count for each in sent) == count
  # Tokens in float32: 8 rows of 64 tokens with 16 channels.
  assert sum(each.bytes for each in sent) == count * 8 * 64 * 16 * 4
  assert {each.kind for each in sent} <= {"all-reduce"}
  assert ("pallas_call" in texts[0]) == (model in WITH_KERNEL)


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
def test_scans_take_the_kernel_also_where_tokens_are_split(texts):
  make("s5", "--config.mesh=sequence:2,model:2").train()
  assert "pallas_call" in texts[0]


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.usefixtures("optimized")
def test_pmap_compiles_for_tpus_to_the_work_of_jit():
  jit, pmap = (
    make("s4d", f"--config.parallel={mode}").train() for mode in ("jit", "pmap")
  )
  assert pmap.devices == 4
  assert pmap.tflop == pytest.approx(jit.tflop, rel=0.1)
  assert {each.kind for each in pmap.collectives} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.parametrize(
  ("model", "parallel"),
  [("transject", "jit"), ("transformer", "jit"), ("s5", "pmap")],
)
@pytest.mark.usefixtures("optimized")
def test_an_evaluation_step_compiles_for_tpus(model, parallel):
  report = make(model, f"--config.parallel={parallel}").evaluation()
  assert report.devices == 4
  assert 0 < report.total < report.available == 15.75
  assert {each.kind for each in report.collectives} == {"all-reduce"}


@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
def test_an_evaluation_makes_rotations_by_the_kernel_on_each_device():
  ahead = make("transject")
  params, layout = ahead.state.params, ahead.layout
  evaluator = Evaluator(ahead.model, "jit", 8, ahead.lengths, layout)
  placed = placed_shapes(params, layout.state_sharding(params))
  text = evaluator.prepare.lower(placed).as_text()
  assert "tpu_custom_call" in text
  assert "sdy.manual_computation" in text  # XLA cannot split a kernel.


@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.parametrize(
  "shape", [(8, 20, 16, 128), (8, 133, 128), (3, 133, 5), (3, 9, 5)]
)
def test_the_kernel_of_the_scan_compiles_for_one_chip(shape):
  """States or rows that fill registers, steps that are last, few steps."""
  layout = Layout.of("data:1", topologies.describe_devices("v5e:2x2")[:1])
  array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding())

  def last(a, b):
    return linear_scan(a, b, reverse=True)[1]

  lowered = jax.jit(layout.traced(last)).lower(array, array)
  assert "pallas_call" in lowered.compile().as_text()


@pytest.mark.slow
@pytest.mark.skipif(NO_CUDA, reason="no compiler for CUDA")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("optimized")
def test_a_train_step_for_gpus_sends_one_all_reduce(model):
  devices = topologies.describe_devices("h100:4")
  chip = topologies.CHIPS["h100"]
  sizes = SIZES | {"max_len": 256}
  report = Ahead(load(model), devices, chip, sizes).train()
  assert 0 < report.total < report.available
  assert report.compiler_ms == 0  # Only the compiler of TPUs has an estimate.
  assert {each.kind for each in report.collectives} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.parametrize("filtered", ["convolution", "gain", "ring"])
@pytest.mark.usefixtures("optimized")
def test_transforms_for_tpus_are_no_products_with_all_points(filtered):
  n, d, device = 1000, 4, topologies.describe_devices("v5e:2x2")[0]

  def run(x):
    kernel = jnp.ones((d, n))
    if filtered == "convolution":
      return convolution.convolve(x, kernel)
    if filtered == "gain":
      return convolution.transform_real(x.reshape(4, -1)[:, :1998])
    sections = ring.Sections(*jnp.ones((2, 1, d // 2)))
    return ring.ring_filter(x, sections, jnp.ones(x.shape[:2], bool), (1,))

  place = jax.sharding.SingleDeviceSharding(device)
  x = jax.ShapeDtypeStruct((2, n, d), jnp.float32, sharding=place)
  with platforms.targeting(device):
    text = jax.jit(run).lower(x).compile().as_text()
  # With such products it is 0.5 million cycles of the ring, or more.
  assert 0 < programs.count(text).cycles < 250_000


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
@pytest.mark.usefixtures("optimized")
def test_dropout_for_tpus_sends_nothing():
  devices = topologies.describe_devices("v5e:2x2")
  layout = Layout.of("data:4", list(devices))
  x = jax.ShapeDtypeStruct((8, 1, 8, 8, 32), jnp.float32)
  x = placed_shapes(x, layout.batch_sharding(x))
  drop = jax.jit(lambda x: Dropout(0.1, jax.random.key(0))(x))
  text = drop.lower(x).compile().as_text()
  assert not programs.count(text, devices).collectives


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
def test_a_scan_for_a_tpu_has_no_loop_over_tokens():
  assert SIZES["max_len"] not in make("s5").train().loops


def make_with_memory(monkeypatch, gib, model="s5", *overrides):
  """Returns steps whose memory is 3 GiB divided by the number of parts."""

  def compile_train(self, parts):
    if 3 / parts > self.chip.gib:
      raise TooLargeError(3 / parts * 2**30)
    numbers = dict.fromkeys([f.name for f in dataclasses.fields(Report)], 0)
    numbers |= {"parts": parts, "total": 3 / parts}
    return Report(**numbers | {"available": self.chip.gib})

  monkeypatch.setattr(Ahead, "_compile_train", compile_train)
  chip = dataclasses.replace(CHIP, gib=gib)
  return Ahead(load(model, *overrides), jax.devices()[:1], chip, SIZES)


@pytest.mark.parametrize(
  ("gib", "overrides", "parts"),
  [(4, (), 1), (2, (), 2), (1, (), 4), (2, ("--config.accumulate=4",), 4)],
)
def test_train_splits_the_batch_until_it_fits(
  monkeypatch, gib, overrides, parts
):
  ahead = make_with_memory(monkeypatch, gib, "transformer", *overrides)
  assert ahead.train().parts == parts


@pytest.mark.parametrize(
  ("gib", "model", "overrides", "parts"),
  [
    (0.1, "transformer", (), 8),
    (2, "transformer", ("--config.accumulate=1",), 1),
    # BatchNorm sees the whole batch.
    (2, "s5", ("--config.model.block.norm_type=batch",), 1),
  ],
)
def test_train_names_the_remedies_if_it_does_not_fit(
  monkeypatch, gib, model, overrides, parts
):
  ahead = make_with_memory(monkeypatch, gib, model, *overrides)
  with pytest.raises(UserError, match=rf"in {parts} part.*config\.mesh"):
    ahead.train()


@pytest.mark.parametrize(
  ("mesh", "least", "message"),
  [
    ("data:4", 1, r"over devices\. With .*fsdp:4 it needs 1\.00 GiB in 1 part"),
    ("data:2,fsdp:2", 1, r"over devices\. With --config\.mesh=fsdp:4 it"),
    ("data:4", 3, r"in 2 part.*over devices\.$"),
    ("fsdp:4", 3, r"in 2 part.*over devices\.$"),
  ],
)
def test_train_finds_the_mesh_that_fits_if_no_number_of_parts_does(
  monkeypatch, mesh, least, message
):
  """Here memory is of parameters, and parts of the batch need no less."""

  def compile_train(self, parts):
    total = max(least, 4 / self.layout.mesh.shape["fsdp"])
    if total > self.chip.gib:
      raise TooLargeError(total * 2**30)
    numbers = dict.fromkeys([f.name for f in dataclasses.fields(Report)], 0)
    return Report(**numbers | {"parts": parts, "total": total})

  monkeypatch.setattr(Ahead, "_compile_train", compile_train)
  chip = dataclasses.replace(CHIP, gib=1.5)
  config = load("transformer", f"--config.mesh={mesh}")
  with pytest.raises(UserError, match=message):
    Ahead(config, jax.devices()[:4], chip, SIZES).train()


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBTPU, reason="no libtpu")
def test_a_step_that_the_compiler_refuses_gets_a_message():
  overrides = ("--config.batch_size=4194304", "--config.accumulate=1")
  with pytest.raises(UserError, match=r"needs 1\d\d\.\d\d GiB in 1 part"):
    make("lru", *overrides).train()


@pytest.mark.parametrize(
  ("overrides", "sizes", "message"),
  [
    (["--config.batch_size=6"], {}, "batch_size=6.*4 device"),
    (["--config.accumulate=3"], {}, "batch_size=8.*3 part"),
    (["--config.margin_tokens=1"], {}, "margin_tokens=1: .*no bound"),
    (["--config.mesh=sequence:4"], {"max_len": 63}, "63 tokens.*'sequence'"),
  ],
)
def test_ahead_refuses_what_a_run_refuses(overrides, sizes, message):
  devices = jax.devices()[:4]
  with pytest.raises(UserError, match=message):
    Ahead(load("s5", *overrides), devices, CHIP, SIZES | sizes)


@pytest.mark.slow
def test_ahead_compiles_for_the_devices_of_this_process():
  ahead = Ahead(load("s5"), jax.devices()[:2], CHIP, SIZES)
  train, evaluation = ahead.train(), ahead.evaluation()
  assert train.devices == evaluation.devices == 2
  assert 0 < evaluation.tflop < train.tflop
  assert train.compiler_ms == 0  # Only the compiler of TPUs has an estimate.
  small = dataclasses.replace(CHIP, gib=1e-6)
  with pytest.raises(UserError, match="needs 0.00 GiB.*eval_batch_size"):
    Ahead(load("s5"), jax.devices()[:2], small, SIZES).evaluation()


def test_a_gpu_without_kernels_for_a_step_has_its_library(monkeypatch):
  chosen = []

  def refuse(lowered, **options):
    chosen.append(options)
    if not options:
      raise jax.errors.JaxRuntimeError("INTERNAL: no tile sizes")
    return lowered.compile()

  monkeypatch.setattr("jaxformers.training.memory.compile_step", refuse)
  gpu = topologies.CHIPS["h100"]
  assert Ahead(load("s5"), jax.devices()[:1], gpu, SIZES).train().tflop > 0
  triton = {"xla_gpu_enable_triton_gemm": False}
  assert chosen == [{}, {"compiler_options": triton}]


@pytest.mark.parametrize("device", ["v5e", "h100"])
def test_a_step_that_fails_in_the_compiler_gets_one_line(device, monkeypatch):
  def refuse(lowered, **options):
    raise jax.errors.JaxRuntimeError("INTERNAL: no tile sizes\nfor dot.56")

  monkeypatch.setattr("jaxformers.training.memory.compile_step", refuse)
  chip = topologies.CHIPS[device]
  ahead = Ahead(load("s5"), jax.devices()[:2], chip, SIZES)
  message = "refuses the train step: INTERNAL: no tile sizes. Some"
  with pytest.raises(UserError, match=message):
    ahead.train()


@pytest.mark.parametrize(
  ("sizes", "inputs", "targets"),
  [
    (SIZES, ((8, 64), jnp.int32), (8,)),
    (SIZES | {"vocab_size": 0}, ((8, 64), jnp.float32), (8,)),
    (SIZES | {"num_inputs": 2}, ((8, 2, 64), jnp.int32), (8,)),
    (SIZES | {"objective": "language_model"}, ((8, 64), jnp.int32), (8, 64)),
    ({"image": (32, 32, 3)}, ((8, 32, 32, 3), jnp.float32), (8,)),
    (
      SIZES
      | {"vocab_size": 0, "channels": 5, "objective": "token_classification"},
      ((8, 64, 5), jnp.float32),
      (8, 64),
    ),
  ],
)
def test_batch_shapes_follow_from_the_sizes(sizes, inputs, targets):
  shapes = batch_shapes(sizes, 8)
  assert (shapes["inputs"].shape, shapes["inputs"].dtype) == inputs
  assert shapes["targets"].shape == shapes["weights"].shape == targets


def test_batch_shapes_refuse_objectives_with_other_arrays():
  with pytest.raises(UserError, match="'spans'.*--sizes"):
    batch_shapes(SIZES | {"objective": "spans"}, 8)


def test_batch_shapes_are_those_of_a_run(smoke, tmp_path):
  run = open_run(smoke("transject"), tmp_path / "run")
  trainer = Trainer(run)
  batch = trainer._loader.batch(trainer._longest(), (0, 0))
  shapes = batch_shapes(run.task.sizes(), run.config.batch_size)
  assert {k: (x.shape, x.dtype.kind) for k, x in shapes.items()} == {
    k: (x.shape, x.dtype.kind) for k, x in batch.items()
  }
