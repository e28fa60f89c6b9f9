import json

from jaxformers import config as c


def test_plain_config_survives_json():
  config = c.base(task={"name": "listops", "sizes": (1, 2)})
  plain = c.plain(config)
  assert plain == json.loads(json.dumps(plain))
  assert plain["task"]["sizes"] == [1, 2]


def test_flatten_keeps_an_empty_section():
  config = {"a": {"b": {"c": 1}, "d": {}}, "e": 2}
  assert c.flatten(config) == {"a.b.c": 1, "a.d": {}, "e": 2}
