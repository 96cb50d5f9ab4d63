"""Install the pure-Python part of Detectron2 0.6, where no Detectron2 can be imported yet.

    python tools/install_detectron2.py [--archive FILE | --download FOLDER]

PyPI has no `detectron2`, only release 0.6 without the C++ operators, as the source archive of
`pb1-detectron2`. This script lets pip fetch it, checks its hash, applies `PATCHES` and installs it
as `detectron2` for the Python that runs the script, which needs torch and setuptools (with uv where
that is there: tools/install_packages.py). Rotated-box
operators and deformable convolution on a GPU stay missing, and say so when they are used.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import install_packages

SOURCE = "pb1-detectron2"
VERSION = "0.6"
SHA256 = "5d2e9e51e523ec72f6a31cca04b0a515492e9514b773a3d134cedc0677170b29"
REPOSITORY = "build Detectron2 from its repository (facebookresearch/detectron2; needs a compiler)"


class InstallError(Exception):
    """What went wrong and what to do about it, in one line."""


class Patch(NamedTuple):
    """One substitution; each of its globs has to hold at least one match."""

    files: str  # globs under detectron2/, separated by spaces
    find: str  # regular expression; ^ and $ match at lines
    replace: str
    why: str


# fmt: off
PATCHES = (
    Patch("layers/*.py evaluation/fast_eval_api.py",
          r"from detectron2 import _C\b", "from detectron2.missing_ops import _C",
          "no compiled extension: the import works, a call names the operator"),
    Patch("layers/nms.py",
          r"return torch\.ops\.detectron2", "from detectron2.missing_ops import _C\n    return _C",
          "the same, for the one operator that is reached through torch.ops"),
    Patch("evaluation/coco_evaluation.py",
          r"detectron2\.evaluation\.fast_eval_api import COCOeval_opt",
          "pycocotools.cocoeval import COCOeval as COCOeval_opt",
          "the fast COCO evaluation is compiled; pycocotools' own gives the same figures"),
    Patch("evaluation/coco_evaluation.py",
          r"self\._use_fast_impl = use_fast_impl", "self._use_fast_impl = False",
          "so that the log does not call the official implementation unofficial"),
    Patch("export/__init__.py",
          r"^from \.api import \*$", "try:\n    from .api import *\nexcept ImportError:\n    pass",
          "torch ships no caffe2 any more; tracing and scripting do without"),
    Patch("**/*.py", r"\bnp\.(bool|int|float|object|str)\b", r"\1",
          "NumPy 1.24 removed these names"),
    Patch("data/transforms/transform.py", r"\bImage\.LINEAR\b", "Image.BILINEAR",
          "Pillow 10 removed the alias"),
    Patch("data/common.py", r"(self\._fallback_candidates), k=", r"sorted(\1), k=",
          "Python 3.11 draws no sample from a set"),
    Patch("model_zoo/model_zoo.py", r"^import pkg_resources\n", "",
          "setuptools 81 removed it"),
    Patch("model_zoo/model_zoo.py", r'pkg_resources\.resource_filename\(\s*"detectron2\.model_zoo"',
          "os.path.join(os.path.dirname(__file__)",
          "the same"),
    Patch("config/lazy.py", r"^( +)import black$",
          r"\1try:\n\1    import black\n\1except ImportError:\n\1    black = None",
          "the pinned black no longer installs; it only lays out the text of LazyConfig.to_py"),
    Patch("config/lazy.py", r"return black\.format_str\(.*\)$", r"\g<0> if black else py_str",
          "the same"),
    Patch("engine/hooks.py", r"lr_scheduler\._LRScheduler", "lr_scheduler.LRScheduler",
          "torch 2.0 renamed it: no checkpoint would hold the state of torch's own schedulers"),
    Patch("projects/panoptic_deeplab/dataset_mapper.py",
          r"^(from panopticapi.*)$", r"def rgb2id(color):\n    \1\n    return rgb2id(color)",
          "PyPI has no panopticapi; only panoptic data needs it"),
)
# fmt: on

NEW_FILES = {
    "detectron2/missing_ops.py": f'''\
"""Stands in for detectron2._C, the compiled operators, which this installation lacks."""


class _MissingOps:
    def __getattr__(self, name):
        raise ImportError(
            f"Detectron2's operator {{name}} is compiled code, which this pure-Python installation "
            "lacks. To have it, {REPOSITORY}."
        )


_C = _MissingOps()
''',
    "pyproject.toml": f"""\
[project]
name = "detectron2"
version = "{VERSION}"
dependencies = [
  "Pillow>=7.1", "matplotlib", "pycocotools>=2.0.2", "termcolor>=1.1", "yacs>=0.1.8", "tabulate",
  "cloudpickle", "tqdm>4.29.0", "tensorboard", "fvcore>=0.1.5,<0.1.6", "iopath>=0.1.7",
  "omegaconf>=2.1", "hydra-core>=1.1",
]

[tool.setuptools]
packages.find = {{ include = ["detectron2*"], namespaces = false }}
package-data = {{ "detectron2.model_zoo" = ["configs/**/*.yaml", "configs/**/*.py"] }}
""",
}

# pip runs the archive's setup.py to learn its name. That asks torch how to compile the operators:
# for the answer, this is as good, and imported in no time.
STAND_IN_TORCH = {
    "torch/__init__.py": """\
__version__ = "1.8"
class cuda:
    is_available = staticmethod(lambda: False)
class version:
    hip = None
""",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": """\
from setuptools import Extension as CppExtension, Extension as CUDAExtension
from setuptools.command.build_ext import build_ext as BuildExtension
CUDA_HOME = ROCM_HOME = None
""",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, help=f"{SOURCE} {VERSION}'s source, fetched before")
    parser.add_argument("--download", type=Path, help="only fetch that source into this folder")
    args = parser.parse_args(argv)
    found = find_detectron2()
    if found and not args.download:
        print(f"install_detectron2: {found} is already here; nothing to do")
        return 0
    try:
        check_requirements()
        if args.download:
            print(f"install_detectron2: {download(args.download)}")
            return 0
        with tempfile.TemporaryDirectory() as folder:
            install(args.archive or download(Path(folder)), Path(folder, "source"))
    except InstallError as error:
        print(f"install_detectron2: {error}", file=sys.stderr)
        return 1
    print(f"install_detectron2: installed Detectron2 {VERSION}, its pure-Python part")
    return 0


def find_detectron2() -> str | None:
    """Name and place of the Detectron2 that this Python would import."""
    spec = importlib.util.find_spec("detectron2")
    if spec is None or spec.origin is None:  # a namespace package: any folder of that name
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    return f"Detectron2 {version[1] if version else ''} in {Path(spec.origin).parent}"


def check_requirements() -> None:
    missing = [name for name in ("torch", "setuptools") if importlib.util.find_spec(name) is None]
    if missing:
        raise InstallError(
            f"{sys.executable} has no {' and no '.join(missing)}; install torch, torchvision, "
            "setuptools and wheel first (`make setup` does all of it)"
        )


def download(folder: Path) -> Path:
    """Let pip fetch the archive; the hash stops pip before it runs a wrong archive's setup.py."""
    with tempfile.TemporaryDirectory() as temporary:
        requirement = f"{SOURCE}=={VERSION} --hash=sha256:{SHA256}\n"
        write_files(Path(temporary), {**STAND_IN_TORCH, "requirement.txt": requirement})
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        options += ["--dest", str(folder), "--requirement", f"{temporary}/requirement.txt"]
        result = run_pip("download", *options, PYTHONPATH=temporary)
    if result.returncode:
        raise InstallError(
            f"pip did not get {SOURCE} {VERSION} ({last_error(result)}); give the archive, fetched "
            f"elsewhere, with --archive FILE, or {REPOSITORY}"
        )
    return next(folder.glob("*.tar.gz"))


def install(archive: Path, source: Path) -> None:
    check_hash(archive)
    unpack(archive, source)
    patch(source)
    result = install_packages.install("--no-deps", "--no-build-isolation", str(source))
    if result.returncode:
        print(result.stdout, result.stderr, sep="\n", file=sys.stderr)
        raise InstallError(f"pip could not install the patched sources ({last_error(result)})")


def check_hash(archive: Path) -> None:
    try:
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise InstallError(f"cannot read the archive {archive}: {error.strerror}") from error
    if found != SHA256:
        raise InstallError(
            f"{archive} is not {SOURCE} {VERSION}, whose sha256 is {SHA256} (found: {found}); "
            "nothing installed, fetch it again"
        )


def unpack(archive: Path, target: Path) -> None:
    """Write the files under the archive's top folder to `target`: no links, owners or modes."""
    with tarfile.open(archive) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            parts = PurePosixPath(member.name).parts[1:]
            if not parts or ".." in parts:
                raise InstallError(f"{archive} would write outside its folder: {member.name}")
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None  # a regular file
            path.write_bytes(content.read())


def patch(source: Path) -> None:
    """Turn the sources of release 0.6 into a pure-Python distribution for today's libraries."""
    # These would compile, install a package named `tools`, and call it by the archive's name.
    for name in ("setup.py", "setup.cfg", "PKG-INFO"):
        (source / name).unlink()
    for package in source.glob("projects/*/*/__init__.py"):
        shutil.move(package.parent, source / "detectron2" / "projects" / package.parent.name)
    apply_patches(source / "detectron2", PATCHES)
    write_files(source, NEW_FILES)


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def apply_patches(package: Path, patches: tuple[Patch, ...]) -> None:
    """Apply each patch to each of its files; one that changes nothing is an error."""
    for row in patches:
        for pattern in row.files.split():
            if not sum(substitute(path, row) for path in sorted(package.glob(pattern))):
                raise InstallError(f"correct PATCHES: {row.find!r} matches nothing in {pattern}")


def substitute(path: Path, row: Patch) -> int:
    text = path.read_text(encoding="utf-8")
    new, count = re.subn(row.find, row.replace, text, flags=re.MULTILINE)
    if count:
        path.write_text(new, encoding="utf-8")
    return count


def run_pip(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def last_error(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.lower().startswith("error")] or lines
    return errors[-1] if errors else f"exit code {result.returncode}"


if __name__ == "__main__":
    sys.exit(main())
