"""Runs a command of `jaxformers.commands`: `python -m jaxformers NAME ...`."""

from jaxformers.foundations import interrupts

if __name__ == "__main__":
  with interrupts.importing():
    from jaxformers.commands.console import console
  console()
