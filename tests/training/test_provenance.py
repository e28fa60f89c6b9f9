"""Where the numbers of a run come from."""

import jax

from jaxformers.training import provenance


def test_where_a_number_comes_from():
  assert provenance.commit()
  assert provenance.hardware()["devices"] == 4
  assert provenance.versions()["jax"] == jax.__version__


def test_an_unpacked_archive_has_a_version(monkeypatch, tmp_path):
  monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a.py"))
  assert provenance.commit().startswith("version ")
