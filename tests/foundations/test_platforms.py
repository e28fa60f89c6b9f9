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
      assert parallel.on_one_gpu(8.0) is expected


def test_portable_programs_have_no_form_for_tpus():
  with platforms.targeting(Described("tpu")):
    assert platforms.on_tpu()
    with platforms.portable():
      assert not platforms.on_tpu()
      assert scan._fastest() == "associative"
