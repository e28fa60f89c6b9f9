"""What every mixer shares: its registry, heads and initializers."""

import jax
import pytest

from jaxformers.models import mixer


@pytest.mark.parametrize("num_heads", [0, 3])
def test_check_heads_refuses_numbers_that_do_not_divide_the_width(num_heads):
  mixer.check_heads(4, 16)
  with pytest.raises(ValueError, match=f"num_heads={num_heads} .*d_model=16"):
    mixer.check_heads(num_heads, 16)


def test_kernel_init_has_the_given_deviation():
  kernel = mixer.kernel_init(0.02)(jax.random.key(0), (200, 100))
  assert float(kernel.std()) == pytest.approx(0.02, rel=0.02)
  # 0 stands for Xavier's initializer, uniform up to sqrt(6 / (in + out)).
  kernel = mixer.kernel_init(0.0)(jax.random.key(0), (200, 100))
  assert float(abs(kernel).max()) == pytest.approx(0.02**0.5, rel=0.01)
  with pytest.raises(ValueError, match="init_std=-1"):
    mixer.kernel_init(-1)


def test_names_with_step_are_those_of_causal_mixers_with_a_cache():
  names = mixer.names_with_step()
  assert {"softmax", "linear", "s5"} <= {*names} <= {*mixer.MIXERS}
  assert "linformer" not in names


def test_bounded_distance_needs_a_declared_distance():
  assert mixer.bounded_distance(mixer.MIXERS["softmax"]()) == ""
  assert mixer.bounded_distance(mixer.MIXERS["allpass"]()) == "sequences"
  assert mixer.bounded_distance(mixer.MIXERS["ball"]()) == "farthest"

  class Undeclared:
    is_bounded = True

  with pytest.raises(ValueError, match="Undeclared is bounded.*declare one of"):
    mixer.bounded_distance(Undeclared())
