"""What tests of the command share."""

import pytest


@pytest.fixture
def cauc(home, tmp_path, command):
    """Return a function that runs `cauc` in a folder that holds the tables of a file's `home`."""
    for path in home.iterdir():
        if path.is_dir():
            (tmp_path / path.name).symlink_to(path)
    return command
