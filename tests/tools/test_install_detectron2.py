"""tools/install_detectron2.py, without network and without changing this environment."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import install_detectron2 as script
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "install_detectron2.py"
# Runs a file as __main__ where `import detectron2` fails and find_spec finds nothing. As ever, the
# file's folder comes first in sys.path, which runpy leaves to its caller.
HIDE = "import sys; sys.modules['detectron2'] = None; "
RUN_HIDDEN = (
    f"{HIDE}import os, runpy; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0]); "
    "runpy.run_path(sys.argv[0], None, '__main__')"
)


def python(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **env}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def install_where_hidden(tmp_path: Path, *arguments: str | Path, **env: str) -> str:
    """Run the script as if Detectron2 were absent, expect failure; returns its one message.

    pip would install into a folder of ours: it has to stay absent.
    """
    target = tmp_path / "target"
    result = python("-c", RUN_HIDDEN, SCRIPT, *arguments, PIP_TARGET=str(target), **env)
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("install_detectron2: ")
    assert not target.exists()
    return lines[0]


def make_archive(path: Path, files: dict[str, str | None]) -> Path:
    """A source archive; a file without text becomes a link to /."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            if text is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/"
            member.size = len(text or "")
            tar.addfile(member, io.BytesIO((text or "").encode()))
    return path


def make_package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


# The whole script


def test_does_nothing_where_a_detectron2_exists(tmp_path: Path) -> None:
    import detectron2

    target = tmp_path / "target"
    result = python(SCRIPT, "--archive", tmp_path / "absent", PIP_TARGET=str(target))
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    assert detectron2.__version__ in result.stdout
    assert str(Path(detectron2.__file__).parent) in result.stdout
    assert not target.exists()


def test_without_torch_says_what_to_install_first(tmp_path: Path) -> None:
    (tmp_path / "detectron2" / "docs").mkdir(parents=True)  # a mere folder is no Detectron2
    result = python("-S", SCRIPT, PYTHONPATH=str(tmp_path))  # -S: no site-packages
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "no torch" in result.stderr
    assert "make setup" in result.stderr


def test_refuses_an_archive_with_another_hash(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "pb1-detectron2-0.6.tar.gz", {"d/setup.py": ""})
    message = install_where_hidden(tmp_path, "--archive", archive)
    assert str(archive) in message
    assert script.SHA256 in message
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in message


def test_says_which_archive_is_missing(tmp_path: Path) -> None:
    absent = tmp_path / "absent.tar.gz"
    message = install_where_hidden(tmp_path, "--archive", absent)
    assert str(absent) in message
    assert "No such file" in message


def test_a_failed_download_names_the_ways_out(tmp_path: Path) -> None:
    message = install_where_hidden(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "No matching distribution" in message
    assert "--archive FILE" in message
    assert "repository" in message


def test_pip_never_runs_the_setup_of_another_archive(tmp_path: Path) -> None:
    """A local folder of archives stands for an index that hands out something else."""
    ran = tmp_path / "ran"
    setup = f"from setuptools import setup; open({str(ran)!r}, 'w'); setup(name='pb1-detectron2')"
    links = tmp_path / "links"
    links.mkdir()
    make_archive(links / "pb1-detectron2-0.6.tar.gz", {"pb1-detectron2-0.6/setup.py": setup})
    message = install_where_hidden(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links))
    assert "DO NOT MATCH THE HASHES" in message
    assert not ran.exists()


# Its parts


def test_unpack_drops_the_top_folder_and_takes_only_plain_files(tmp_path: Path) -> None:
    archive = make_archive(
        tmp_path / "a.tar.gz", {"top/x/y.py": "1", "top/z": "2", "top/link": None}
    )
    script.unpack(archive, tmp_path / "out")
    files = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")}
    assert files == {"x", "x/y.py", "z"}
    assert (tmp_path / "out" / "z").read_text(encoding="utf-8") == "2"


def test_unpack_refuses_to_leave_its_folder(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", {"top/../../evil": "1"})
    with pytest.raises(script.InstallError, match="outside"):
        script.unpack(archive, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


# For each row of the table, in its order: a snippet before and after.
SNIPPETS = [
    ("from detectron2 import _C\n", "from detectron2.missing_ops import _C\n"),
    (
        "    return torch.ops.detectron2.nms_rotated(b)\n",
        "    from detectron2.missing_ops import _C\n    return _C.nms_rotated(b)\n",
    ),
    (
        "from detectron2.evaluation.fast_eval_api import COCOeval_opt",
        "from pycocotools.cocoeval import COCOeval as COCOeval_opt",
    ),
    ("self._use_fast_impl = use_fast_impl\n", "self._use_fast_impl = False\n"),
    (
        "from .api import *\nfrom .flatten import T\n",
        "try:\n    from .api import *\nexcept ImportError:\n    pass\nfrom .flatten import T\n",
    ),
    (
        "np.bool, np.int, np.float, np.object, np.str, np.bool_, np.int64, np.float32",
        "bool, int, float, object, str, np.bool_, np.int64, np.float32",
    ),
    ("interp=Image.LINEAR, fill=0", "interp=Image.BILINEAR, fill=0"),
    ("sample(self._fallback_candidates, k=1)", "sample(sorted(self._fallback_candidates), k=1)"),
    ("import os\nimport pkg_resources\nimport torch\n", "import os\nimport torch\n"),
    (
        'pkg_resources.resource_filename(\n    "detectron2.model_zoo", os.path.join("configs", p))',
        'os.path.join(os.path.dirname(__file__), os.path.join("configs", p))',
    ),
    (
        "    import black\n",
        "    try:\n        import black\n    except ImportError:\n        black = None\n",
    ),
    (
        "return black.format_str(py_str, mode=black.Mode())\n",
        "return black.format_str(py_str, mode=black.Mode()) if black else py_str\n",
    ),
    ("torch.optim.lr_scheduler._LRScheduler)", "torch.optim.lr_scheduler.LRScheduler)"),
    (
        "from panopticapi.utils import rgb2id\nx = rgb2id(y)\n",
        "def rgb2id(color):\n    from panopticapi.utils import rgb2id\n    return rgb2id(color)\n"
        "x = rgb2id(y)\n",
    ),
]


@pytest.mark.parametrize(
    ("row", "before", "after"),
    [(row, *snippet) for row, snippet in zip(script.PATCHES, SNIPPETS, strict=True)],
)
def test_a_row_changes_its_snippet(
    row: tuple[str, ...], before: str, after: str, tmp_path: Path
) -> None:
    first_glob = row[0].split()[0]
    package = make_package(tmp_path, {first_glob.replace("*", "x"): before})
    script.apply_patches(package, (script.Patch(first_glob, *row[1:]),))
    assert (package / first_glob.replace("*", "x")).read_text(encoding="utf-8") == after


def test_a_row_applies_to_all_its_files(tmp_path: Path) -> None:
    package = make_package(tmp_path, {"layers/a.py": "old", "layers/b.py": "old", "c/d.py": "old"})
    script.apply_patches(package, (script.Patch("layers/*.py c/d.py", r"^old$", "new", "why"),))
    assert {path.read_text() for path in package.rglob("*.py")} == {"new"}


@pytest.mark.parametrize("files", ["a.py", "absent.py", "b.py a.py", "b.py absent.py"])
def test_a_row_that_matches_nothing_is_an_error(files: str, tmp_path: Path) -> None:
    package = make_package(tmp_path, {"a.py": "something else", "b.py": "old"})
    with pytest.raises(script.InstallError, match=r"'old' matches nothing in (a|absent)\.py"):
        script.apply_patches(package, (script.Patch(files, "old", "new", "why"),))


def test_the_stand_in_for_the_operators_names_the_one_that_is_missing() -> None:
    namespace: dict[str, object] = {}
    exec(script.NEW_FILES["detectron2/missing_ops.py"], namespace)
    with pytest.raises(ImportError, match=r"nms_rotated is compiled.*from its repository"):
        namespace["_C"].nms_rotated()  # type: ignore[attr-defined]


# The package where Detectron2 is absent


def test_the_samplers_alone_import_without_detectron2() -> None:
    use = (
        "import torch; from d2_static_sampler.samplers import build_label_sampler; "
        "sample = build_label_sampler('static')(torch.tensor([0, 1, 0, -1]), num_samples=2, "
        "positive_fraction=0.5, bg_label=0); print(int(sample.num_pos), int(sample.num_neg))"
    )
    result = python("-c", HIDE + use)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "1"]


def test_what_needs_detectron2_says_how_to_get_it() -> None:
    ask = (
        "import d2_static_sampler\n"
        "try: d2_static_sampler.install_sampler\n"
        "except ImportError as error: print(error)"
    )
    result = python("-c", HIDE + "\n" + ask)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1, result.stdout
    assert "tools/install_detectron2.py" in result.stdout
