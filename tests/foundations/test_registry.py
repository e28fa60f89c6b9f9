import pytest

from jaxformers.foundations import registry


def test_registry_unknown_name_lists_choices_and_the_nearest():
  names = registry.Registry("mixer")
  names.register("softmax")(1)
  names.register("linear")(2)
  assert (names["softmax"], sorted(names), len(names)) == (
    1,
    ["linear", "softmax"],
    2,
  )
  with pytest.raises(ValueError, match="mixer.*'softmx'.*'softmax'"):
    names["softmx"]
  assert "softmx" not in names


def test_open_registry_error_names_config_imports():
  names = registry.Registry("mixer", is_open=True)
  with pytest.raises(ValueError, match="'mine'.*config.imports"):
    names["mine"]


def test_registry_refuses_a_name_twice():
  names = registry.Registry("mixer")
  names.register("softmax")(1)
  with pytest.raises(ValueError, match="'softmax'.*registered"):
    names.register("softmax")(2)


def test_call_refuses_an_unknown_option():
  def make(*, width, depth=2):
    return width, depth

  assert registry.call("net", make, {"width": 3}) == (3, 2)
  with pytest.raises(ValueError, match="net.*'widht'.*depth, width"):
    registry.call("net", make, {"widht": 3})
  with pytest.raises(ValueError, match="net.*width"):
    registry.call("net", make, {})


def test_choose_returns_a_choice_or_lists_them():
  assert registry.choose("pool", "max", ("max", "mean")) == "max"
  with pytest.raises(ValueError, match="pool.*'min'.*max, mean"):
    registry.choose("pool", "min", ("max", "mean"))


def test_an_entry_without_a_docstring_has_an_empty_summary():
  def documented():
    """Does one thing.

    And says more.
    """

  assert registry.summarize(documented) == "Does one thing."
  assert registry.summarize(lambda: None) == ""
