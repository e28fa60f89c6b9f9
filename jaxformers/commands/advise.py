r"""Recommends depth and width for a number of parameters.

python -m jaxformers advise --params 125e6 --vocab 32000
python -m jaxformers advise --params 125e6 --vocab 32000 \
    --config configs/lm/text.py --out advice

The fit (`jaxformers.theory.fit`) is that of Levine et al.'s later version,
arXiv 2006.12467: log d = 5.039 + 0.0555 L, from decoders of 6 to 48 layers with
12 L d^2 parameters besides the embedding. The recommended network has at most
96 layers. Its parameters differ from the given number by less than 10 %, and
from 10 M on by less than 5 %.

The rank of the embedding is at most the size of the vocabulary. By the theory,
a width above that rank is wasted (arXiv 2105.03928), and more layers are the
better use of the parameters.
"""

from __future__ import annotations

from pathlib import Path

from jaxformers import config as configs
from jaxformers.foundations import cli, requirements
from jaxformers.theory import advise


def _sizes(spec: str) -> advise.Sizes:
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
    "size of the vocabulary, which bounds the width (default: no bound)",
  ),
  cli.option(
    "rank",
    0,
    "rank of the embedding, which bounds the width (default: no bound)",
  ),
  cli.option("config", "", "path.py:key=value,..."),
  cli.option("out", "", "write OUT.png and OUT.svg"),
)
def main(params: float, vocab: int, rank: int, config: str, out: str) -> None:
  """Prints the advice, and draws it if asked."""
  if out:
    requirements.require("plots", f"--out={out}")
  sizes = _sizes(config) if config else None
  print("\n".join(advise.advice_lines(params, vocab, rank, sizes)))
  if out:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
      picture = path.with_name(path.name + suffix)
      advise.draw(picture, advise.advise(params, vocab, rank), sizes)
    print(f"Written to {path}.png and .svg.")


if __name__ == "__main__":
  main()
