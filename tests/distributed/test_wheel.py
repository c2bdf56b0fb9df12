"""The wheel, built and installed in an environment of its own, has the commands, the recipes and the library."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_installs_and_plans_a_recipe(tmp_path):
    def call(*command, **options):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("disaggkd-*.whl")
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # What it depends on is installed here already; only the package itself comes from the wheel.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    there = {"cwd": tmp_path, "env": environment}
    disaggkd = tmp_path / "venv" / "bin" / "disaggkd"
    assert "own-chats" in call(disaggkd, "init", "--list", **there)
    call(disaggkd, "init", "own-text", **there)
    assert "take:" in call(disaggkd, "plan", "own-text.yaml", **there)
    where = call(python, "-c", "import disaggkd, disaggkd_cli; print(disaggkd_cli.__file__)", **there)
    assert str(packages) in where
