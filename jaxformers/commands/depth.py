r"""Compares depth with width at equal parameters, from the runs of a sweep.

jaxformers depth runs/figure2 --out figure2

For every depth and width, the learning rate with the largest number of seeds is
used. A tie is resolved by the best loss on the selection split. Runs that
differ in any other field are an error. Welch's t-test at 95 % decides if two
depths differ. Each pair is tested separately, so one of twenty pairs of equal
depths will appear to differ. The table and the picture show the test loss over
12 L d^2, the number of parameters besides the embedding, as in figure 2 of
Levine et al. 2020 (https://arxiv.org/abs/2006.12467).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxformers.analysis.tables import depth
from jaxformers.analysis.tables.results import read_runs
from jaxformers.foundations import cli, requirements


@cli.command(cli.WORKDIRS, cli.option("out", "", "write OUT.png, .svg, .csv"))
def main(workdirs: Sequence[Path], out: str) -> None:
  """Prints the tables, and draws them if --out is set."""
  # Check for the plotting library before the computation.
  if out:
    requirements.require("plots", f"--out={out}")
  points = depth.select_points(read_runs(workdirs))
  print(depth.markdown(points))
  if out:
    path = Path(out)
    depth.figure(points, path.name).write(path.parent)
    print(f"Written to {path}.png, .svg and .csv.")


if __name__ == "__main__":
  main()
