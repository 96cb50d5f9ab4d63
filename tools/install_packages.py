"""Install packages as `pip install` does, several times as fast where `uv` is there.

    python tools/install_packages.py ARGUMENT ...    # those of `pip install` that uv has as well

Installs into the environment of the Python that runs it. uv reads none of pip's settings, so it is
told them: indexes, folders of wheels, constraints, certificates. Plain pip installs where uv is
missing or fails, and where pip has a setting that uv would not follow.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# pip's settings in uv's options. Where a setting has several values, the option is repeated.
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
# What uv may leave aside: where the packages come from and which they are does not depend on it.
NO_MATTER = {
    *("break-system-packages", "cache-dir", "compile", "default-timeout", "no-cache-dir"),
    *("no-color", "no-compile", "no-input", "no-warn-script-location", "progress-bar", "quiet"),
    *("require-virtualenv", "retries", "root-user-action", "timeout", "verbose"),
    *("config-file", "disable-pip-version-check", "no-python-version-warning"),
}


def main(arguments: list[str]) -> int:
    result = install(*arguments)
    print(result.stdout, end="")
    print(result.stderr, end="", file=sys.stderr)
    return result.returncode


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What uv said where it could install; what pip said otherwise."""
    if importlib.util.find_spec("uv") is not None:
        settings = pip_settings()
        unknown = sorted(settings.keys() - UV_OPTIONS.keys() - NO_MATTER - {"cert"})
        if unknown:
            reason = f"pip's setting {unknown[0]}"
        else:
            result = run(*uv_command(settings), *arguments)
            if result.returncode == 0:
                return result
            reason = last_line(result.stderr)
        print(f"install_packages: pip instead of uv ({reason})", flush=True)
    return run(*PIP, "--quiet", "install", *arguments)


def pip_settings() -> dict[str, str]:
    """pip's settings for `pip install`, from its files and the environment."""
    lines = run(*PIP, "config", "list").stdout.splitlines()
    rows = [line.partition("=") for line in lines if "=" in line]
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):  # a later one replaces an earlier one
        found = {key: value for key, _, value in rows if key.startswith(section)}
        settings |= {key[len(section) :]: ast.literal_eval(found[key]) for key in found}
    return settings


def uv_command(settings: dict[str, str]) -> list[str]:
    """uv's command up to the packages."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match"]  # pip's: all indexes are equal
    for name in settings.keys() & UV_OPTIONS.keys():
        for value in settings[name].split():
            command += [UV_OPTIONS[name], value]
    if "cert" in settings:
        os.environ.setdefault("SSL_CERT_FILE", settings["cert"])
    return command


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
