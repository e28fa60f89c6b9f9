import numpy as np
import pytest

from jaxformers.data.engine.packed import pack
from jaxformers.tasks import pixels


@pytest.mark.parametrize(
  ("protocol", "inputs", "size"),
  [
    (pixels.PixelProtocol(), [1, 11, 256], 257),
    (pixels.PixelProtocol(pad_is_zero=True), [0, 10, 255], 256),
    (pixels.PixelProtocol(scale=(0.0, 255.0)), [0, 10 / 255, 1], 0),
  ],
)
def test_pixel_protocol_maps_pixels_to_inputs(protocol, inputs, size):
  split = pack([np.array([0, 10, 255], np.uint8)], np.array([0]))
  applied = protocol.apply({"test": split})["test"]
  outputs = applied.batch(np.array([0]), 3)["inputs"]
  np.testing.assert_allclose(outputs, [inputs], rtol=1e-6)
  vocabulary = protocol.vocabulary
  assert len(vocabulary) == size
  if size:
    assert [vocabulary[i] for i in inputs] == ["0", "10", "255"]
