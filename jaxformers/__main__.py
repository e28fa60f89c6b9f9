"""`python -m jaxformers`: see `commands`."""

from jaxformers.commands import console

if __name__ == "__main__":
  console()
