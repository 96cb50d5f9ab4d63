"""tools/install_packages.py, with made-up packages and environments of the tests' own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import install_packages as script
import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install_packages.py"
needs_uv = pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="no uv here")


def make_wheel(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{name}.py": "", f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return path


def make_index(folder: Path, name: str, *versions: str) -> str:
    """An index of one package; returns its address."""
    paths = [make_wheel(folder / name, name, version) for version in versions]
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in paths)
    (folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.as_uri()


@pytest.fixture
def settings(elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's settings file: two indexes with a package each, two folders likewise, a constraint."""
    folders = [tmp_path / "folder_1", tmp_path / "folder_2"]
    make_wheel(folders[0], "madeupc", "1.0")
    make_wheel(folders[1], "madeupd", "1.0")
    (tmp_path / "constraints.txt").write_text("madeupa<2\n")
    path = tmp_path / "pip.conf"
    path.write_text(
        "[global]\n"
        f"index-url = {make_index(tmp_path / 'index_1', 'madeupa', '1.0', '2.0')}\n"
        f"constraint = {tmp_path / 'constraints.txt'}\n"
        "[install]\n"
        f"extra-index-url = {make_index(tmp_path / 'index_2', 'madeupb', '1.0')}\n"
        f"find-links =\n    {folders[0]}\n    {folders[1]}\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip nor uv finds this user's settings, and uv keeps nothing."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "UV_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def install(folder: Path, *packages: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the script in an environment of its own; returns what it said and what is installed."""
    venv.create(folder / "env", with_pip=False)
    # pip and uv are taken from the environment of the tests.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    command = [str(folder / "env" / "bin" / "python"), str(SCRIPT), *packages]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return result, {path.name for path in (folder / "env").rglob("*.dist-info")}


@needs_uv
@pytest.mark.parametrize("only_wheels", [False, True])
def test_packages_come_from_where_pips_settings_say(
    only_wheels: bool, settings: Path, tmp_path: Path
) -> None:
    """With a setting that uv is not told, pip installs: the same packages."""
    if only_wheels:
        with settings.open("a") as file:
            file.write("only-binary = :all:\n")
    result, installed = install(tmp_path, "madeupa", "madeupb", "madeupc", "madeupd")
    assert result.returncode == 0, result.stderr
    assert installed == {f"madeup{letter}-1.0.dist-info" for letter in "abcd"}
    expected = "install_packages: pip instead of uv (pip's setting only-binary)\n"
    assert result.stdout == (expected if only_wheels else "")


@needs_uv
@pytest.mark.usefixtures("settings")
def test_pip_has_the_last_word_where_uv_fails(tmp_path: Path) -> None:
    result, installed = install(tmp_path, "madeupe")
    assert result.returncode == 1
    assert "install_packages: pip instead of uv (" in result.stdout
    assert "No matching distribution found for madeupe" in result.stderr
    assert not installed


@pytest.mark.usefixtures("elsewhere")
def test_a_later_place_of_pips_settings_replaces_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pip.conf"
    path.write_text("[global]\nfind-links = a\nconstraint = a\n[install]\nfind-links = b c\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    monkeypatch.setenv("PIP_CONSTRAINT", "d")
    found = script.pip_settings()
    assert (found["find-links"], found["constraint"]) == ("b c", "d")
