"""Descriptions of accelerators."""

import importlib.util

import pytest

from jaxformers.foundations.errors import UserError
from jaxformers.training import topologies

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
  ],
)
def test_read_name_refuses_unknown_topologies(name, message):
  with pytest.raises(UserError, match=message):
    topologies.read_name(name)


def test_describe_devices_without_libtpu_names_the_remedy(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match=r"libtpu.*pip install.*\[aot\]"):
    topologies.describe_devices("v5e:2x2")


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
  ],
)
def test_describe_devices_lists_one_device_for_each_chip(name, slices, count):
  devices = topologies.describe_devices(name, slices)
  assert len(devices) == count
  cores = 1 if name.startswith("v5e") else 2
  assert {device.num_cores for device in devices} == {cores}
  assert {device.platform for device in devices} == {"tpu"}


@needs_libtpu
@pytest.mark.slow
def test_describe_devices_refuses_a_shape_that_no_slice_has():
  with pytest.raises(UserError, match="v5e:3x5.*v5e:4x4"):
    topologies.describe_devices("v5e:3x5")
