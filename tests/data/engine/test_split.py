import numpy as np
import pytest

from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.segments import Segments
from jaxformers.data.engine.split import Split
from jaxformers.data.images.scenes import Scenes
from jaxformers.data.images.splits import Images
from jaxformers.tasks.arrays import Numbers
from jaxformers.tasks.reconstruction import MaskedTokens
from jaxformers.tasks.simcse import ScoredPairs
from jaxformers.tasks.squad import Questions

CLASSES = (
  Images,
  Numbers,
  Packed,
  Questions,
  MaskedTokens,
  Scenes,
  ScoredPairs,
  Segments,
)


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_of_splits_have_all_that_readers_ask_for(kind):
  assert Split in kind.__mro__
  assert not kind.__abstractmethods__


def test_a_split_that_repeats_nothing_and_cuts_nothing_says_so():
  split = Segments(np.arange(9), length=4, stride=4)
  assert Split.repeats.fget(split) == split.repeats == 1
  numbers = Numbers(np.zeros((3, 2)), np.zeros(3), np.arange(3))
  assert (numbers.repeats, numbers.scoring()) == (1, {})


def test_a_class_that_lacks_a_method_is_refused():
  class Half(Split):
    def __len__(self):
      return 0

  with pytest.raises(TypeError, match="abstract"):
    Half()
