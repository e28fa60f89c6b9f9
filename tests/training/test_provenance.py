"""Where the numbers of a run come from."""

import jax

from jaxformers.training import provenance


def test_provenance_has_commit_hardware_and_versions():
  assert provenance.commit()
  assert provenance.hardware()["devices"] == 4
  assert provenance.versions()["jax"] == jax.__version__


def test_commit_of_an_unpacked_archive_is_the_version(monkeypatch, tmp_path):
  at_start = provenance.commit()
  monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a.py"))
  assert provenance.commit() == at_start  # The code was imported before.
  assert provenance.commit.__wrapped__().startswith("version ")
