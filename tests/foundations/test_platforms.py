"""Code follows the device for which it is traced."""

import jax
import pytest

from jaxformers import scan
from jaxformers.foundations import platforms
from jaxformers.models import parallel


class Described:
  """A device of the description of a topology."""

  def __init__(self, platform, compute_capability=""):
    self.platform = platform
    self.compute_capability = compute_capability


def test_backend_is_that_of_the_process_without_a_target():
  assert platforms.backend() == jax.default_backend() == "cpu"
  assert platforms.target() == jax.devices()[0]


@pytest.mark.parametrize(
  ("platform", "backend"), [("tpu", "tpu"), ("cuda", "gpu"), ("cpu", "cpu")]
)
def test_backend_is_that_of_the_target(platform, backend):
  with platforms.targeting(Described(platform)):
    assert platforms.backend() == backend
  assert platforms.backend() == "cpu"


def test_scan_takes_the_form_of_the_target():
  assert scan._fastest() == "scan"
  for platform, form in (("tpu", "kernel"), ("cuda", "associative")):
    with platforms.targeting(Described(platform)):
      assert scan._fastest() == form
      assert not parallel.on_one_cpu()


def test_fused_attention_needs_the_capability_of_the_target():
  for capability, expected in (("9.0", True), ("7.5", False), ("", False)):
    with platforms.targeting(Described("cuda", capability)):
      assert parallel.on_gpus(8.0) is expected


@pytest.mark.parametrize(
  ("sizes", "expected"), [((4, 1), True), ((1, 4), False), ((2, 2), False)]
)
def test_fused_attention_is_for_meshes_that_split_only_rows(sizes, expected):
  mesh = jax.sharding.AbstractMesh(sizes, ("data", "sequence"))
  device = Described("cuda", "9.0")
  with platforms.targeting(device), jax.sharding.use_abstract_mesh(mesh):
    assert parallel.on_gpus(8.0) is expected


def test_portable_programs_have_no_form_for_tpus():
  with platforms.targeting(Described("tpu")):
    assert platforms.on_tpu()
    with platforms.portable():
      assert not platforms.on_tpu()
      assert scan._fastest() == "associative"


def test_a_tpu_has_fourier_transforms_of_other_sizes():
  least = (1, 128, 129, 1_999, 4_096, 4_097, 7_999, 8_193)
  sizes = [1, 128, 160, 2_016, 4_096, 4_160, 8_000, 8_320]
  assert [*map(platforms.fast_size, least)] == sizes
  assert platforms.ring_size(1_000) == 2_000
  with platforms.targeting(Described("tpu")):
    assert platforms.ring_size(1_000) == 2_016
    with platforms.portable():
      assert platforms.ring_size(1_000) == 2_000
