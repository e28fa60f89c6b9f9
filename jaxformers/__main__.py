"""`python -m jaxformers`: see `commands`."""

from jaxformers.foundations import interrupts

if __name__ == "__main__":
  with interrupts.importing():
    from jaxformers.commands.console import console
  console()
