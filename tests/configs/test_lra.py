"""Configs of configs/lra build a model, for every model and size."""

import itertools

import pytest

from jaxformers import config as c
from jaxformers import models, tasks
from jaxformers.recipes import lra
from jaxformers.recipes.traits import find_traits
from tests import optimizers
from tests.assertions import assert_all
from tests.marks import long_except

SIZES = {
  "listops": dict(vocab_size=16, max_len=1999, num_classes=10),
  "text": dict(vocab_size=257, max_len=4000, num_classes=2),
  "retrieval": dict(vocab_size=257, max_len=4000, num_classes=2, num_inputs=2),
  "image": dict(vocab_size=257, max_len=1024, num_classes=10),
  "pathfinder": dict(vocab_size=257, max_len=1024, num_classes=2),
  "pathx": dict(vocab_size=257, max_len=16_384, num_classes=2),
}
PROTOCOLS = ("jaxformers", "lra", "skyformer", "s4", "paper")
# Parameters by config, model and size. A change here changes the comparison.
GOLDEN = {
  ("listops", "transject", "paper"): 5_579_148,
  ("listops", "transject", "tiny"): 19_276,
  ("listops", "random_transject", "paper"): 5_317_516,
  ("listops", "random_transject", "tiny"): 18_284,
  ("listops", "transformer", "paper"): 205_642,
  ("text", "transject", "paper"): 5_639_812,
  ("text", "transject", "tiny"): 22_100,
  ("text", "random_transject", "paper"): 5_378_180,
  ("text", "random_transject", "tiny"): 21_108,
  ("text", "transformer", "paper"): 348_098,
  ("retrieval", "transject", "paper"): 5_705_348,
  ("retrieval", "transject", "tiny"): 53_859,
  ("retrieval", "random_transject", "paper"): 5_443_716,
  ("retrieval", "random_transject", "tiny"): 49_827,
  ("retrieval", "transformer", "paper"): 356_290,
  ("image", "transject", "paper"): 5_640_844,
  ("image", "transject", "tiny"): 38_507,
  ("image", "random_transject", "paper"): 5_379_212,
  ("image", "random_transject", "tiny"): 34_475,
  ("image", "transformer", "paper"): 158_666,
  ("pathfinder", "transject", "paper"): 5_639_812,
  ("pathfinder", "transject", "tiny"): 22_100,
  ("pathfinder", "random_transject", "paper"): 5_378_180,
  ("pathfinder", "random_transject", "tiny"): 21_108,
  ("pathfinder", "transformer", "paper"): 157_634,
  ("pathx", "transject", "paper"): 5_639_812,
  ("pathx", "transject", "tiny"): 22_100,
  ("pathx", "random_transject", "paper"): 5_378_180,
  ("pathx", "random_transject", "tiny"): 21_108,
  ("pathx", "transformer", "paper"): 1_140_674,
}

# Models with as many parameters as the Transformer, and published models with
# another number. New models need be in neither.
SAME_SIZE = {
  "bigbird",
  "informer",
  "kernelized",
  "linear_transformer",
  "local",
  "neutreno",
  "nystromformer",
  "performer",
  "skyformer",
  "sparse",
  "transformer",
  "transformer_orthogonal",
}
OTHER_SIZE = {
  "linearized",
  "linformer",
  "longformer",
  "random_transject",
  "reformer",
  "sinkhorn",
  "symmetric_transformer",
  "synthesizer",
  "transformer_rezero",
  "transject",
}


def check_parameters(task, model, size, count):
  """Fails unless a config's model has a number of parameters."""
  config = c.plain(c.load(f"configs/lra/{task}.py:model={model},size={size}"))
  optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  built = models.build(**config["model"], **SIZES[task])
  assert models.size(built) == count


@pytest.mark.slow
def test_lra_configs_have_the_expected_parameters():
  cases = [(*case, count) for case, count in GOLDEN.items()]
  assert_all(check_parameters, cases, least=30)


# Sizes that differ under a protocol. Under s4 image and both Pathfinders are
# real numbers, and the characters of Text and Retrieval depend on the archive.
READINGS = {
  ("listops", "skyformer"): dict(vocab_size=15),
  ("listops", "paper"): dict(vocab_size=15),
  ("listops", "s4"): dict(vocab_size=18, max_len=2_048),
  ("text", "lra"): dict(max_len=1_000),
  ("text", "s4"): dict(vocab_size=134, max_len=4_096),
  ("retrieval", "s4"): dict(vocab_size=98),
  **{
    (task, protocol): dict(vocab_size=size)
    for task in ("image", "pathfinder", "pathx")
    for protocol, size in (
      ("lra", 256),
      ("skyformer", 256),
      ("paper", 256),
      ("s4", 0),
    )
  },
}


@pytest.mark.parametrize("protocol", long_except(("lra",), PROTOCOLS))
@pytest.mark.parametrize("task", sorted(SIZES))
@pytest.mark.slow
def test_lra_matched_transject_has_no_more_parameters_than_the_reference(
  task, protocol
):
  """And at most 15 % less: the next width that suits would have more."""
  config = c.plain(
    c.load(f"configs/lra/{task}.py:size=matched,protocol={protocol}")
  )
  sizes = SIZES[task] | READINGS.get((task, protocol), {})
  model, reference = (
    models.size(models.build(**config[which], **sizes))
    for which in ("model", "reference")
  )
  assert 0.85 * reference < model <= reference
  assert config["model"]["mixer"]["num_experts"] == 4


@pytest.mark.parametrize(
  "model",
  long_except(("informer", "s5", "transject"), sorted(models.MODELS)),
)
@pytest.mark.slow
def test_lra_text_config_builds_every_model_and_size(model):
  sizes = ("paper",)
  traits = find_traits(model)
  if traits.is_transject or traits.recurrence:
    sizes = ("paper", "matched", "tiny")
  for size in sizes:
    config = c.plain(c.load(f"configs/lra/text.py:model={model},size={size}"))
    built = models.build(**config["model"], **SIZES["text"])
    reference = models.build(**config["reference"], **SIZES["text"])
    is_same_size = models.size(built) == models.size(reference)
    assert model not in (OTHER_SIZE if is_same_size else SAME_SIZE)
  config = c.plain(c.load(f"configs/short/imdb.py:model={model}"))
  sizes = {"vocab_size": 30_522, "max_len": 512, "num_classes": 2}
  assert models.build(**config["model"], **sizes)


def check_head(task, protocol, model):
  """Fails unless a model pools as the protocol of a task asks for."""
  config = c.plain(
    c.load(f"configs/lra/{task}.py:model={model},protocol={protocol}")
  )
  assert config["task"]["protocol"] == protocol
  options = config["model"]
  # TransJect pools the maximum except on Text, and other models the mean.
  is_maximum = model == "transject" and task != "text"
  transjects = "max" if is_maximum else "mean"
  pool = {
    "jaxformers": transjects,
    "lra": "cls",
    "skyformer": "padded_mean",
    "s4": "mean",
    "paper": transjects if model == "transject" else "padded_mean",
  }[protocol]
  if protocol == "lra":
    # The dual encoder has no class token, and Pathfinder pools a mean.
    others = dict(retrieval="first", pathfinder="all_mean", pathx="all_mean")
    pool = others.get(task, pool)
  if protocol == "s4" and task != "retrieval":
    assert options["head_dim"] == 0
  assert options["pool"] == pool
  sizes = SIZES[task]
  if protocol == "s4" and task in ("image", "pathfinder", "pathx"):
    sizes = sizes | {"vocab_size": 0}
  models.size(models.build(**options, **sizes))


@pytest.mark.long
def test_lra_protocols_have_their_pool_and_head():
  both = ("transject", "transformer")
  assert_all(check_head, itertools.product(SIZES, PROTOCOLS, both), least=60)


@pytest.mark.parametrize("task", sorted(SIZES))
def test_lra_configs_set_all_options_of_their_task(task):
  options = c.plain(c.load(f"configs/lra/{task}.py"))["task"]
  accepted = tasks.TASKS[options.pop("name")].__kwdefaults__
  assert options.keys() <= accepted.keys() - {"data_dir"}
  assert options.keys() >= accepted.keys() - {"data_dir"}


@pytest.mark.parametrize(
  ("arg", "message"),
  [
    ("modle=x", "modle.*model"),
    ("size=huge", "size.*huge.*paper"),
    ("seed=one", "seed.*one.*int"),
    ("protocol=mega", "protocol.*mega.*lra"),
  ],
)
def test_lra_configs_refuse_wrong_arguments(arg, message):
  def check(task):
    with pytest.raises(ValueError, match=message):
      c.load(f"configs/lra/{task}.py:{arg}")

  assert_all(check, zip(SIZES), least=6)


def test_listops_on_a_laptop_begins_with_short_expressions():
  tiny, laptop = (
    c.load(f"lra/listops:size={size},model=lru") for size in ("tiny", "laptop")
  )
  assert laptop.model == tiny.model
  assert laptop.task.num_short and not tiny.task.num_short
  assert 0 < laptop.short_steps < laptop.total_steps and not tiny.short_steps


def test_pathfinder_on_a_laptop_begins_with_short_snakes():
  tiny, laptop = (
    c.load(f"lra/pathfinder:size={size},model=s5,protocol=s4")
    for size in ("tiny", "laptop")
  )
  assert laptop.model.pool == "max"
  numbers = laptop.task.short_paddles.split()
  steps = laptop.short_steps // len(numbers)
  # The images of each number are read at most once.
  assert 0 < steps * laptop.batch_size <= laptop.task.num_short
  assert laptop.short_steps < laptop.total_steps
  assert not tiny.task.num_short and not tiny.short_steps


def test_laptops_train_long_and_only_recurrences_have_other_sizes():
  def check(task, model, is_other):
    tiny, laptop = (
      c.load(f"lra/{task}:size={size},model={model}")
      for size in ("tiny", "laptop")
    )
    sizes = [(m.model.num_layers, m.model.d_model) for m in (tiny, laptop)]
    assert (sizes[0] != sizes[1]) == is_other, sizes
    if not is_other:
      assert laptop.model == tiny.model
    assert laptop.total_steps * laptop.batch_size >= 80_000

  models = {"lru": True, "mlstm": True, "transformer": False}
  models |= {"transject": False, "isometric": False}
  names = ("text", "image", "retrieval", "pathfinder")
  cases = itertools.product(names, models.items())
  assert_all(check, ((task, *model) for task, model in cases), least=20)
  # The length of reviews is Long Range Arena's, and documents are cut.
  for task, length in (("text", 0), ("retrieval", 2_000)):
    assert c.load(f"lra/{task}:size=laptop").task.max_len == length


def test_laptop_is_refused_for_other_tasks():
  with pytest.raises(ValueError, match="size=laptop.*pathx.*size=tiny"):
    c.load("lra/pathx:size=laptop,model=lru")


def test_lra_configs_have_the_sizes_of_the_paper():
  config = c.load("configs/lra/text.py")
  assert (config.model.d_model, config.model.num_layers) == (512, 2)
  assert (config.model.mixer.num_experts, config.model.pool) == (4, "mean")
  assert c.load("configs/lra/listops.py").model.pool == "max"
  assert (config.batch_size, config.total_steps) == (32, 50_000)
  skyformer = {
    "listops": (32, 1e-4, 1_000),
    "text": (32, 1e-4, 80),
    "retrieval": (16, 2e-4, 800),
    "image": (256, 1e-4, 175),
    "pathfinder": (128, 2e-4, 312),
  }
  for task, (batch_size, rate, warmup) in skyformer.items():
    config = c.load(f"configs/lra/{task}.py")
    assert config.batch_size == batch_size
    assert config.schedule.learning_rate == rate
    assert config.schedule.warmup_steps == warmup


def test_lra_config_docstrings_name_their_file():
  for task in SIZES:
    with open(f"configs/lra/{task}.py") as file:
      assert f"jaxformers train lra/{task}" in file.read()


def test_lra_paper_protocol_is_skyformer_but_for_the_protocol():
  for task in SIZES:
    spec = f"configs/lra/{task}.py:model={{}},protocol={{}}".format
    sky, paper = (
      c.plain(c.load(spec("bigbird", p))) for p in ("skyformer", "paper")
    )
    (difference,) = c.differences(sky, paper)
    assert "protocol" in difference


# Queries of Informer and buckets of Reformer in Skyformer's code.
SKYFORMER = {
  "listops": (136, 64),
  "text": (144, 128),
  "retrieval": (144, 128),
  "image": (133, 32),
  "pathfinder": (133, 32),
}


@pytest.mark.parametrize("task", sorted(SKYFORMER))
def test_lra_queries_and_buckets_are_skyformers(task):
  queries, buckets = SKYFORMER[task]
  path = f"configs/lra/{task}.py:protocol=paper,model="
  informer = c.load(f"{path}informer").model.mixer
  assert (informer.num_queries, informer.num_samples) == (queries, queries)
  assert c.load(f"{path}reformer").model.mixer.num_buckets == buckets


# Parameters of LRA's Transformer at the sizes of its configs.
LRA_SIZES = {
  "listops": 8_479_626,
  "text": 3_254_658,
  "retrieval": 1_087_618,
  "image": 248_458,
  "pathfinder": 29_890,
  "pathx": 541_314,
}


@pytest.mark.parametrize("task", sorted(LRA_SIZES))
def test_lra_protocol_has_the_published_sizes_and_schedule(task):
  spec = f"configs/lra/{task}.py:protocol=lra,model={{}}".format
  sizes = SIZES[task] | READINGS.get((task, "lra"), {})
  config = c.plain(c.load(spec("transformer")))
  assert (
    models.size(models.build(**config["model"], **sizes)) == LRA_SIZES[task]
  )
  _, rate = optimizers.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  peak = max(float(rate(step)) for step in (312, 1_000, 2_500, 5_000, 8_000))
  expected = {"listops": 1.58e-3, "text": 5.59e-4, "retrieval": 3.49e-4}
  expected |= {"image": 5e-4, "pathfinder": 1e-3, "pathx": 1e-3}
  assert peak == pytest.approx(expected[task], rel=5e-3)
  # The run ends where LRA's does.
  ends = {"listops": 7.07e-4, "text": 3.54e-4, "retrieval": 3.49e-4}
  end = float(rate(config["total_steps"]))
  assert end == pytest.approx(ends.get(task, 0), rel=5e-3, abs=1e-9)
  reformer = c.load(spec("reformer")).model
  assert reformer.mixer.chunk_size == 10
  assert "head_size" in reformer.mixer_defaults


def test_lra_image_sinkhorn_has_the_published_size_and_decay():
  spec = "configs/lra/image.py:model={},protocol=lra".format
  config = c.load(spec("sinkhorn"))
  model = config.model
  assert (model.d_model, model.num_layers, model.dropout_rate) == (32, 1, 0.1)
  assert config.optimizer.weight_decay == 0.7
  assert c.load(spec("local")).optimizer.weight_decay == 0


@pytest.mark.parametrize(
  "model", ["local", "sinkhorn", *sorted(lra.LRA_MIXERS)]
)
def test_lra_pathfinder_has_the_published_size_of_every_model(model):
  """On Pathfinder LRA's efficient Transformers have sizes of their own."""
  spec = f"configs/lra/pathfinder.py:protocol=lra,model={model}"
  sizes = SIZES["pathfinder"] | READINGS["pathfinder", "lra"]
  config = c.plain(c.load(spec))["model"]
  assert models.build(**config, **sizes).config.d_model in (32, 64)
  assert config["mixer"].items() >= lra.LRA_MIXERS.get(model, {}).items()
  # Blocks of images are wider than those of texts.
  if model in ("local", "sinkhorn", "sparse"):
    text = c.load(f"configs/lra/text.py:protocol=lra,model={model}").model
    assert (config["mixer"]["block_size"], text.mixer.block_size) == (64, 50)
