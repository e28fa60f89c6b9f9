.PHONY: install test lint format docs

install:
	pip install -e '.[lint,test]'

test:
	pytest

lint:
	ruff check .
	ruff format --check .
	mypy
	typos

docs:
	mkdocs build --strict

format:
	ruff check --fix .
	ruff format .
