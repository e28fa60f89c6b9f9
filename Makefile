.PHONY: install test lint format

install:
	pip install -e '.[test]'

test:
	pytest

lint:
	ruff check .
	ruff format --check .

format:
	ruff check --fix .
	ruff format .
