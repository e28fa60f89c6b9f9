"""Content of a `results.json`, with the fields that every reader needs."""


def make(config, **fields):
  """Returns the results of a run of a config; `fields` replace or add some."""
  least = {
    "task": "listops",
    "protocol": "lra",
    "model": "transject",
    "seed": config["seed"],
    "config": config,
    "max_len": 8,
    "parameters": 1,
    "parameter_ratio": 1.0,
    "baselines": {},
    "data": {},
    "selection": "validation",
    "train_seconds": 1.0,
    "metric": "accuracy",
    "metrics_records": 0,
    "accuracy": 0.5,
  }
  return least | fields
