"""Separation ranks, against the reference's table and closed forms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.commands import rank as rank_command
from jaxformers.theory import bounds, linearized
from jaxformers.theory import rank as r
from tests.assertions import assert_all

pytestmark = pytest.mark.slow

# (L, d, H, N) and the rank; all rows of the reference that take a moment.
TABLE = [
  *(
    (1, d, h, n, d + 1)
    for d, h, n in itertools.product((2, 3, 4, 6, 8), (1, 2, 4), (2, 4, 8))
    if d % h == 0
  ),
  (2, 2, 1, 2, 15),
  (2, 2, 2, 2, 15),
  (2, 2, 1, 4, 18),
  (2, 2, 2, 4, 17),
  *((2, 3, 1, n, k) for n, k in [(2, 35), (4, 49), (6, 49)]),
  *((2, 4, 1, n, k) for n, k in [(2, 70), (4, 110), (6, 110), (8, 110)]),
  *((2, 4, 2, n, k) for n, k in [(2, 70), (4, 107), (6, 107), (8, 107)]),
  *((2, 4, 4, n, k) for n, k in [(2, 69), (4, 85), (6, 85), (8, 85)]),
  *((2, 5, 1, n, k) for n, k in [(2, 126), (4, 216)]),
  *((2, 6, 1, n, k) for n, k in [(2, 210), (4, 385)]),
  (2, 6, 2, 4, 379),
  (2, 6, 3, 4, 340),
  *((3, 2, h, 2, 105) for h in (1, 2)),
  (3, 2, 1, 4, 232),
  (3, 2, 2, 4, 215),
]


def check_rank(depth, d, heads, n, want):
  """Fails unless a measured rank is the reference's, and within the bounds."""
  setting = r.Setting(depth, d, heads, n)
  found = r.measure_rank(setting)
  assert found.exact
  assert found.rank == want
  assert r.closed_form(setting) in (None, want)
  if d > heads:
    low, high, theorem = bounds.bounds(depth, d, heads)
    assert theorem == (1 if 3**depth <= d else 2)
    assert low <= bounds.log3(want) <= high + 1e-9
    assert bounds.log3(want) <= bounds.highest(depth, d, heads) + 1e-9


@pytest.mark.long
def test_measure_rank_gives_the_ranks_of_the_reference():
  assert_all(check_rank, TABLE, least=60)


@pytest.mark.long
def test_measure_rank_of_larger_settings():
  assert r.measure_rank(r.Setting(2, 10)).rank == 1_001
  assert r.measure_rank(r.Setting(3, 3)).rank == 560
  found = r.measure_rank(r.Setting(3, 3, num_tokens=4), max_points=1_500)
  assert found == (1_500, False, 1_500)


@pytest.mark.parametrize(
  ("rank", "depth", "n", "want"),
  [
    (2, 1, 2, 3),
    (2, 2, 2, 15),
    (2, 2, 4, 18),
    (2, 3, 2, 105),
    (2, 3, 4, 232),
    (3, 2, 4, 49),
  ],
)
@pytest.mark.parametrize("d", [4, 6])
@pytest.mark.long
def test_measure_rank_of_low_rank_inputs_is_that_of_a_narrow_network(
  rank, depth, n, want, d
):
  setting = r.Setting(depth, d, num_tokens=n, input_rank=rank)
  assert r.measure_rank(setting).rank == want
  assert r.closed_form(setting) in (None, want)


def test_measure_rank_is_equal_for_balanced_partitions_and_seeds():
  """Proposition 1, and findings 2 and 5 of the reference."""
  for part in itertools.combinations(range(4), 2):
    assert r.measure_rank(r.Setting(2, 3, num_tokens=4, part=part)).rank == 49
  for seed in range(6):
    assert r.measure_rank(r.Setting(2, 3, num_tokens=4), seed).rank == 49
  for d, want in ((2, 18), (3, 49)):
    setting = r.Setting(2, d, num_tokens=4, residual=True)
    assert r.measure_rank(setting).rank == want
  for position, channel in ((3, 0), (1, 2)):
    setting = r.Setting(2, 3, num_tokens=4, position=position, channel=channel)
    assert r.measure_rank(setting).rank == 49


def test_measure_rank_of_an_unbalanced_partition():
  """It counts which group the token is in that is looked at."""
  ranks = [
    r.measure_rank(r.Setting(2, 3, num_tokens=4, part=part)).rank
    for part in ((0,), (1,), (0, 1), (1, 2, 3))
  ]
  assert ranks == [39, 43, 49, 39]  # A group and its complement are one.
  for part in ((0,), (2,), (0, 1)):
    assert r.measure_rank(r.Setting(1, 4, num_tokens=3, part=part)).rank == 5


def test_grid_is_the_literal_sum_over_tokens():
  """Equation 3, in Python's integers."""
  p = r.PRIME
  setting = r.Setting(2, 4, 2, 4, position=2, channel=1, residual=True)
  weights = r.draw_weights(setting, 5)
  a, b = r.draw_tokens(setting, 3, 5)
  found = r.grid(setting, weights, a, b)
  into, of = (w.astype(object) for w in weights)
  for s, t in itertools.product(range(3), range(3)):
    x = np.concatenate([a[s], b[t]]).astype(object)
    for layer in range(2):
      new = x.copy()
      for i, j, h in itertools.product(range(4), range(4), range(2)):
        score = x[j] @ of[layer, h] @ x[i]
        new[i] = (new[i] + score * (into[layer, h] @ x[j])) % p
      x = new % p
    assert found[s, t] == x[2, 1]


@pytest.mark.parametrize("residual", [False, True])
def test_grid_is_the_compact_form(residual):
  """On integers so small that none is reduced modulo the prime."""
  setting = r.Setting(2, 2, 2, 4, residual=residual, position=1, channel=1)
  rng = np.random.default_rng(0)
  weights = r.Weights(*rng.integers(0, 3, (2, 2, 2, 2, 2)))
  a, b = rng.integers(0, 3, (2, 3, 2, 2))
  found = r.grid(setting, weights, a, b)
  x = np.stack([[np.concatenate([one, two]) for two in b] for one in a]).astype(
    np.float64
  )
  with jax.enable_x64(True):
    x = jnp.asarray(x)
    weights = r.Weights(*(jnp.asarray(w, jnp.float64) for w in weights))
    form = functools.partial(
      linearized.compact, maps=weights, residual=residual
    )
    want = np.asarray(jax.vmap(jax.vmap(form))(x))[..., 1, 1]
  assert want.max() < r.PRIME
  np.testing.assert_allclose(found, want, rtol=1e-13)


def test_modular_rank_of_known_matrices():
  rng = np.random.default_rng(0)
  for rank in (0, 1, 7, 12):
    m = rng.integers(0, r.PRIME, (12, rank))
    n = rng.integers(0, r.PRIME, (rank, 15))
    assert r.modular_rank(r._product(m, n)) == rank
  assert r.modular_rank(np.array([[0, 2], [0, 0], [3, 0]])) == 2
  assert r.modular_rank(np.array([[r.PRIME, 1]])) == 1


def test_draw_tokens_of_more_points_begins_with_the_same():
  setting = r.Setting(2, 3, num_tokens=4)
  few, many = (r.draw_tokens(setting, k, 1) for k in (3, 9))
  for x, y in zip(few, many, strict=True):
    np.testing.assert_array_equal(x, y[:3])


def singular_values(setting, points):
  """Singular values of the grid in float64, relative to the largest.

  Weights are [L, H, d, d] of rank d / H, and they and the tokens are normal.
  """
  s, rng = setting, np.random.default_rng([0, 9])
  shape = (s.num_layers, s.num_heads)
  width = s.d_model // s.num_heads
  q, k, v = (rng.normal(size=(*shape, width, s.d_model)) for _ in range(3))
  o = rng.normal(size=(*shape, s.d_model, width))
  a, b = (rng.normal(size=(points, len(g), s.d_model)) for g in s.groups)
  with jax.enable_x64(True):
    weights = r.Weights(jnp.asarray(o @ v), jnp.asarray(k.swapaxes(-1, -2) @ q))

    @functools.partial(jax.vmap, in_axes=(None, 0))
    @functools.partial(jax.vmap, in_axes=(0, None))
    def output(first, second):
      x = jnp.concatenate([first, second])
      return linearized.compact(x, weights)[0, 0]

    matrix = np.asarray(jax.jit(output)(a, b))
  values = np.linalg.svd(matrix / np.abs(matrix).max(), compute_uv=False)
  return values / values[0]


def test_float64_rank_is_exact_for_two_layers_and_not_for_three():
  for n, want in ((2, 35), (4, 49)):
    values = singular_values(r.Setting(2, 3, num_tokens=n), 80)
    for threshold in (1e-9, 1e-10, 1e-12):
      assert (values > threshold).sum() == want
  values = singular_values(r.Setting(3, 2, num_tokens=4), 300)
  counts = [(values > t).sum() for t in (1e-8, 1e-10, 1e-12)]
  assert counts[0] < counts[1] < counts[2] < 232


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(num_layers=0), "num_layers=0"),
    (dict(num_heads=3), "num_heads=3.*d_model=4"),
    (dict(num_tokens=3), "num_tokens=3.*`part`"),
    (dict(num_tokens=1), "num_tokens=1"),
    (dict(part=(0, 1)), r"part=\(0, 1\)"),
    (dict(part=(5,)), r"part=\(5,\)"),
    (dict(position=2), "position=2.*0.*1"),
    (dict(channel=4), "channel=4"),
    (dict(input_rank=5), "input_rank=5"),
  ],
)
def test_setting_refuses_wrong_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    r.Setting(**({"num_layers": 2, "d_model": 4} | fields))
  with pytest.raises(ValueError, match="max_points=1"):
    r.measure_rank(r.Setting(1, 2), max_points=1)


def test_rank_command_prints_a_table_with_bounds(capsys):
  rank_command.main(["--num_layers=1,2", "--d_model=2,4", "--num_heads=2"])
  rows = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in capsys.readouterr().out.splitlines()[2:]
  ]
  assert [row[:6] for row in rows] == [
    ["1", "2", "2", "2", "3", "3"],
    ["1", "4", "2", "2", "5", "5"],
    ["2", "2", "2", "2", "15", ""],
    ["2", "4", "2", "2", "70", ""],
  ]
  low, high, _ = bounds.theorem_1(1, 4, 2)
  low_2, high_2, _ = bounds.theorem_2(2, 4, 2)
  assert float(rows[3][6]) == pytest.approx(bounds.log3(70), abs=0.01)
  assert rows[2][7] == ""  # As many heads as channels have no bound.
  assert rows[1][7] == f"theorem 1: {low:.2f} to {high:.2f}"
  # Deeper than log_3 4.
  assert rows[3][7] == f"theorem 2: {low_2:.2f} to {high_2:.2f}"
  rank_command.main(
    ["--num_layers=2", "--d_model=3", "--num_tokens=4", "--part=1"]
  )
  assert "| 2 | 3 | 1 | 4 | 43 |" in capsys.readouterr().out
  rank_command.main(["--num_layers=2", "--d_model=6", "--max_points=20"])
  assert ">= 20" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("fields", "theorem"),
  [
    (dict(num_layers=1, d_model=4), "theorem 1: 0.46 to 1.46"),
    (dict(num_layers=1, d_model=3), "theorem 1: 0.33 to 1.26"),
    (dict(num_layers=1, d_model=2), "theorem 2: -1.87 to 8.71"),
    (dict(num_layers=2, d_model=4), "theorem 2: -3.74 to 20.38"),
    # No theorem is about these.
    (dict(num_layers=1, d_model=4, num_heads=4), ""),
    (dict(num_layers=1, d_model=4, input_rank=2), ""),
    (dict(num_layers=1, d_model=4, num_tokens=4, part=(0,)), ""),
  ],
)
def test_rank_table_has_the_bounds_of_the_theorem_that_holds(fields, theorem):
  row = r.rank_table([r.Setting(**fields)], 64, 0).splitlines()[2]
  assert row.split("|")[-2].strip() == theorem


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--num_heads=3", "num_heads=3.*d_model=4"),
    ("--num_tokens=3", "num_tokens=3"),
    ("--num_layers=two", "--num_layers=two"),
    ("--part=2", r"part=\(2,\)"),
    ("--position=2", "position=2"),
  ],
)
def test_rank_command_refuses_wrong_arguments(argument, message):
  with pytest.raises(SystemExit, match=message):
    rank_command.main(["--num_layers=1", "--d_model=4", argument])
