"""Optimisers built from sections of a config."""

from jaxformers.config import Choice
from jaxformers.training import optim


def build(optimizer, schedule, total_steps, *kinds):
  """Builds the optimiser and the learning rate from two dictionaries."""
  choices = [Choice.from_dict(section) for section in (optimizer, schedule)]
  return optim.build_optimizer(*choices, total_steps, *kinds)
