"""Tables and figures are cited by their numbers in the paper."""

import re

from tests.assertions import assert_all

NEUTRENO = {
  "configs/vision/imagenet.py": 1,
  "configs/vision/ade20k.py": 2,
  "configs/vision/cifar10.py": 8,
  "configs/lm/wikitext103.py": 3,
  "jaxformers/analysis/evaluation/perplexity.py": 3,
  "jaxformers/analysis/evaluation/segmentation.py": 2,
  "jaxformers/data/engine/segments.py": 3,
  "jaxformers/models/mixers/kernelized.py": 8,
  "jaxformers/models/segmenter.py": 2,
  "docs/data.md": 3,
}


def test_cited_tables_of_neutreno_have_the_paper_numbers(request):
  def check(path, table):
    text = (request.config.rootpath / path).read_text()
    assert re.findall(r"NeuTRENO's\s+table\s+(\d+)", text) == [str(table)]

  assert_all(check, NEUTRENO.items())


def test_cited_figures_in_report_page_have_the_paper_numbers(request):
  text = (request.config.rootpath / "docs/report.md").read_text()
  rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|", text, re.M))
  # Figures: cosine of tokens, J, attention maps, heads; table: slopes.
  assert rows["How alike tokens become"] == (
    "NeuTRENO, figures 1, 3 and 5, table 4"
  )
  assert rows["Softmax of queries and keys"] == "NeuTRENO, figure 4"
