"""Descriptions of accelerators."""

import importlib.util

import pytest

from jaxformers.foundations.errors import UserError
from jaxformers.training import topologies

NO_CUDA = importlib.util.find_spec("jax_cuda13_plugin") is None
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu"
)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("v9:2x2", "device 'v9'.*v5e"),
    ("v5e", "v5e: ''"),
    ("v5e:2", "'2'.*v5e:2x2"),
    ("v5e:0x2", "'0x2'"),
    ("h100:0", "'0'.*h100:8"),
    ("h100:1x2x4", "'1x2x4'"),
    ("v5litepod-12", "v5litepod-12.*v5e:2x2"),
    ("v4-1", "v4-1.*power of two"),
    ("v6p-8", "type of slice 'v6p'.*v5litepod"),
  ],
)
def test_read_name_refuses_unknown_topologies(name, message):
  with pytest.raises(UserError, match=message):
    topologies.read_name(name)


@pytest.mark.parametrize(
  ("name", "kind", "shape"),
  [
    ("v5p:2x2", "v5p", (2, 2)),
    ("h100", "h100", (1,)),
    ("b200:2x8", "b200", (2, 8)),
    # Types of the cloud, and the topologies that it lists for them.
    ("v5litepod-1", "v5e", (1, 1)),
    ("v5litepod-4", "v5e", (2, 2)),
    ("v5litepod-8", "v5e", (2, 4)),
    ("v5litepod-16", "v5e", (4, 4)),
    ("v6e-64", "v6e", (8, 8)),
    ("v6e-256", "v6e", (16, 16)),
    ("v4-8", "v4", (2, 2, 1)),
    ("v5p-16", "v5p", (2, 2, 2)),
    ("v5p-32", "v5p", (2, 2, 4)),
    ("v5p-128", "v5p", (4, 4, 4)),
  ],
)
def test_read_name_knows_topologies_and_types_of_the_cloud(name, kind, shape):
  assert topologies.read_name(name) == (kind, shape)


@pytest.mark.parametrize(
  ("device", "message"),
  [
    ("v5e:2x2", r"libtpu.*pip install.*\[aot\]"),
    ("h100", r"jax_cuda13_plugin.*pip install.*\[cuda\]"),
  ],
)
def test_describe_devices_without_a_compiler_names_the_remedy(
  monkeypatch, device, message
):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match=message):
    topologies.describe_devices(device)


@pytest.mark.slow
@pytest.mark.skipif(NO_CUDA, reason="no compiler for CUDA")
@pytest.mark.parametrize("name", ["h100:2", "h200:2x1", "b200:1x2"])
def test_describe_devices_lists_gpus(name):
  devices = topologies.describe_devices(name)
  assert len(devices) == 2
  assert {device.platform for device in devices} <= {"cuda", "gpu"}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "slices", "count"),
  [
    ("v5e:1x1", 1, 1),
    ("v5e:2x2", 1, 4),
    ("v5e:4x4", 2, 32),
    ("v5p:2x2", 1, 4),
    ("v4:2x2", 1, 4),
    ("v6e-16", 1, 16),
  ],
)
def test_describe_devices_lists_one_device_for_each_chip(name, slices, count):
  devices = topologies.describe_devices(name, slices)
  assert len(devices) == count
  cores = 1 if name.startswith(("v5e", "v6e")) else 2
  assert {device.num_cores for device in devices} == {cores}
  assert {device.platform for device in devices} == {"tpu"}


@needs_libtpu
@pytest.mark.slow
def test_describe_devices_refuses_a_shape_that_no_slice_has():
  with pytest.raises(UserError, match="v5e:3x5.*v5e:4x4"):
    topologies.describe_devices("v5e:3x5")
