r"""Time series of the UEA archive, several channels, one class for each series.

Nothing is downloaded: unpack the .zip of a data set from
https://www.timeseriesclassification.com, and give its folder, which holds
PROBLEM_TRAIN.ts and PROBLEM_TEST.ts:

jaxformers train series/uea:problem=BasicMotions \
    --workdir runs/motions --config.task.archive=PATH/BasicMotions

protocol=jaxformers has the archive's own test split. protocol=linoss divides
all series at random, 70 : 15 : 15, as the code of LinOSS does. Published test
splits have 36 to 85 series, so that an accuracy has a standard error of 3.5 to
6.6 points, and each seed has other test series. Four of the six data sets of
that paper are near chance for all published models (SelfRegulationSCP2,
MotorImagery, EthanolConcentration, Heartbeat): compare with the trivial rules,
which are printed next to the score. docs/results.md has scores.

size=published has the sizes, rates and steps of LinOSS on these six data sets,
which take hours; the authors also stop after ten evaluations without a gain
(--config.patience=10).

Arguments: problem=NAME of a data set; model=NAME, one that jaxformers models
lists; size=tiny|published; protocol=jaxformers|linoss; seed=0, which also draws
the splits of linoss.
"""

from jaxformers import config as c
from jaxformers.recipes import lra, shared, time_series


def get_config(arg=None):
  arg = c.parse_arg(
    arg,
    problem="BasicMotions",
    model="linoss",
    size="tiny",
    protocol="jaxformers",
    seed=0,
  )
  config = c.base(
    seed=arg.seed,
    task={
      "name": "time_series",
      "protocol": arg.protocol,
      "problem": arg.problem,
      "seed": arg.seed if arg.protocol == "linoss" else 0,
      "include_time": False,
      "archive": "",
    },
    **lra.model_fields(
      arg.model,
      pools={"jaxformers": "mean", "linoss": "mean"},
      protocol=arg.protocol,
      size="tiny",
      matched={"jaxformers": 94, "linoss": 94},
    ),
    batch_size=16,
    eval_batch_size=16,
    **shared.tiny_schedule(
      shared.tiny_rate(arg.model, 5e-3), total_steps=1_000
    ),
  )
  time_series.set_size(config, arg.size)
  return config
