"""Optimisers of sections of a config, as a config file writes them."""

from jaxformers.config import Choice
from jaxformers.training import optim


def build(optimizer, schedule, total_steps, *kinds):
  """The optimiser and the learning rate of two sections, as dictionaries."""
  choices = [Choice.from_dict(section) for section in (optimizer, schedule)]
  return optim.build_optimizer(*choices, total_steps, *kinds)
