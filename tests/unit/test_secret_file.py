"""The file with the secret of a run: made once, by one; read only where nobody else can."""

import os
import stat
import threading

import pytest

from disaggkd_cli.errors import UserError
from disaggkd_cli.secret import await_secret, make_secret, read_secret


def test_it_is_made_once_for_its_user_alone(tmp_path):
    path = tmp_path / "runs" / "secret"
    old = os.umask(0)
    try:
        make_secret(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = read_secret(path)
    make_secret(path)
    assert read_secret(path) == first and len(first) == 64
    assert [each.name for each in path.parent.iterdir()] == ["secret"]


def test_of_many_who_make_it_at_once_all_read_one(tmp_path):
    path, read = tmp_path / "secret", []
    threads = [threading.Thread(target=lambda: (make_secret(path), read.append(read_secret(path)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 8 and len(set(read)) == 1


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"x" * 64, 0o640, "chmod 600"),
        (b"x" * 64, 0o604, "chmod 600"),
        (b"x" * 31, 0o600, "holds 31 bytes"),
        (b"  \n", 0o600, "holds 0 bytes"),
        (b"x" * 5000, 0o600, "holds 4097 bytes"),
    ],
)
def test_what_is_no_secret_is_refused_with_the_mend(tmp_path, content, mode, said):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(UserError, match=said) as error:
        read_secret(path)
    assert str(error.value).startswith("launch.secret_file: ")


def test_a_missing_one_and_a_directory_are_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(UserError, match="launch.secret_file"):
        read_secret(tmp_path)
    with pytest.raises(UserError, match="launch.secret_file"):
        make_secret(tmp_path / "file" / "secret") if (tmp_path / "file").write_text("") is not None else None


def test_who_waits_for_it_says_so_once_and_gives_up_with_the_mend(tmp_path):
    lines, path = [], tmp_path / "secret"

    def find():
        return path if path.exists() else None

    with pytest.raises(UserError, match="launch.secret=none"):
        await_secret(find, path, 0.3, lines.append)
    assert len(lines) == 1 and str(path) in lines[0]
    threading.Timer(0.1, make_secret, [path]).start()
    assert await_secret(find, path, 5, lines.append) == read_secret(path)
