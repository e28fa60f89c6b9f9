"""Bounds separation ranks, and says if depth or width limits a network.

jaxformers bounds --num_layers 96 --d_model 12288 --num_heads 96

Source: Levine et al. 2020, "Limits to Depth Efficiencies of Self-Attention",
https://arxiv.org/abs/2006.12467, theorems 1 and 2 and their corollaries. Ranks
are printed as log_3 of the rank, which does not overflow at L = 96 and
d = 12,288.

Differs from the first printed version of the paper in two places. c_2 of
theorem 2 is misprinted there; here it is
-2 d log_3(d / (2 sqrt(2 e))) + log_3 d, with which the two upper bounds meet at
L = log_3 d. The example of corollary 1 also differs; see `width_needed`.
"""

from __future__ import annotations

from jaxformers.foundations import cli
from jaxformers.theory import bounds


@cli.command(
  cli.argument("--num_layers", type=int, required=True, help="depth L"),
  cli.argument("--d_model", type=int, required=True, help="width d"),
  cli.argument("--num_heads", default=1, help="number of heads, below d_model"),
)
def main(num_layers: int, d_model: int, num_heads: int) -> None:
  """Prints the bounds of a network, and its regime."""
  print("\n".join(bounds.bound_lines(num_layers, d_model, num_heads)))


if __name__ == "__main__":
  main()
