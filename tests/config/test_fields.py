import pytest

from jaxformers import config as c
from jaxformers import ranges


def test_base_refuses_an_unknown_field():
  assert c.base(seed=3).seed == 3
  with pytest.raises(ValueError, match="field 'batchsize'.*'batch_size'"):
    c.base(batchsize=3)


def test_resumable_fields_exist():
  for path in c.RESUMABLE_FIELDS:
    assert path.partition(".")[0] in c.FIELDS
    assert ranges.find(path) is not None
