"""`python -m jaxformers` is `python -m jaxformers.main`."""

from jaxformers.main import console

if __name__ == "__main__":
  console()
