import pytest

from jaxformers import config as c
from jaxformers import ranges


def test_base_refuses_an_unknown_field():
  assert c.base(seed=3).seed == 3
  with pytest.raises(ValueError, match="field 'batchsize'.*'batch_size'"):
    c.base(batchsize=3)


def test_resumable_fields_exist():
  for path in c.RESUMABLE_FIELDS:
    is_removed = path in c.fields.REMOVED_FIELDS
    assert (path.partition(".")[0] in c.FIELDS) != is_removed
    assert (ranges.find(path) is not None) != is_removed
