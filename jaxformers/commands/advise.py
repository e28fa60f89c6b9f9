r"""Recommends depth and width for a number of parameters.

jaxformers advise --params 125e6 --vocab 32000
jaxformers advise --params 125e6 --vocab 32000 \
    --config lm/text --out advice

The recommendation uses the fit (`jaxformers.theory.fit`) of the later version
of Levine et al., arXiv 2006.12467: log d = 5.039 + 0.0555 L. It was fitted to
decoders of 6 to 48 layers with 12 L d^2 parameters besides the embedding. The
recommended network has at most 96 layers. Its number of parameters differs from
the given number by less than 10 %, and by less than 5 % above 10 M parameters.

The rank of the embedding is at most the size of the vocabulary. By the theory,
a width above that rank is wasted (arXiv 2105.03928), and the parameters are
better spent on more layers.
"""

from __future__ import annotations

from pathlib import Path

from jaxformers import config as configs
from jaxformers.foundations import cli, requirements
from jaxformers.theory import advise


def _sizes(spec: str) -> advise.Sizes:
  """Returns the sizes of the model of a config."""
  model = configs.plain(configs.load(spec))["model"]
  mlp_dim = model.get("block", {}).get("mlp_dim", 0)
  return advise.Sizes(model["num_layers"], model["d_model"], mlp_dim)


@cli.command(
  cli.argument(
    "--params",
    type=float,
    required=True,
    help="number of parameters without the embedding, such as 125e6",
  ),
  cli.option(
    "vocab",
    0,
    "size of the vocabulary, an upper bound of the width (default: no bound)",
  ),
  cli.option(
    "rank",
    0,
    "rank of the embedding, an upper bound of the width (default: no bound)",
  ),
  cli.option("config", "", "path.py:key=value,..."),
  cli.option("out", "", "write OUT.png and OUT.svg"),
)
def main(params: float, vocab: int, rank: int, config: str, out: str) -> None:
  """Prints the recommendation, and draws it if --out is set."""
  # Check for the plotting library before the computation.
  if out:
    requirements.require("plots", f"--out={out}")
  sizes = _sizes(config) if config else None
  print("\n".join(advise.advice_lines(params, vocab, rank, sizes)))
  # Draw the recommendation and the sizes of the config.
  if out:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
      picture = path.with_name(path.name + suffix)
      advise.draw(picture, advise.advise(params, vocab, rank), sizes)
    print(f"Written to {path}.png and .svg.")


if __name__ == "__main__":
  main()
