"""`python -m jaxformers`: see `commands`."""

from jaxformers import interrupts

if __name__ == "__main__":
  with interrupts.importing():
    from jaxformers.commands import console
  console()
