"""Whether a run has ended, from its files."""

import pytest

from jaxrl.run.ending import has_ended


@pytest.mark.parametrize("name", ["missing", "file", "loop", "n" * 300], ids=lambda name: name[:8])
def test_what_cannot_be_looked_at_has_not_ended(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert not has_ended(tmp_path / name)
