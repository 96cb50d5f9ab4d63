"""The compiled sampler: really compiled, few graphs, the static sampler's samples."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from d2_static_sampler import build_label_sampler
from d2_static_sampler.samplers import compiled as compiled_module
from tests.helpers import needs_inductor
from tests.processes import run_script

ASKED = {"num_samples": 64, "positive_fraction": 0.5, "bg_label": 0}


@needs_inductor
def test_two_graphs_serve_every_size_and_batch():
    static, compiled = (
        build_label_sampler("static"),
        build_label_sampler("compiled", compiles_cpu=True),
    )
    for rows in (2, 1, 3, 2, 5):
        for n in (40, 700, 3000, 10_001):
            labels = torch.randint(-1, 3, (rows, n)).to(torch.int8)
            words = torch.randint(1 << 62, (2, rows, 64))
            expected = static(labels, **ASKED, words=words)
            sample = compiled(labels, **ASKED, words=words)
            assert torch.equal(sample.index, expected.index)
            assert torch.equal(sample.num_pos, expected.num_pos)
            assert torch.equal(sample.num_neg, expected.num_neg)
    assert compiled.num_graphs == 2
    with torch.autocast("cpu", torch.bfloat16):
        compiled(labels, **ASKED)
    with torch.inference_mode():
        compiled(labels, **ASKED)
    assert compiled.num_graphs <= 3
    assert not compiled.is_eager


@needs_inductor
def test_words_of_any_layout_and_mode_use_the_same_graphs():
    compiled = build_label_sampler("compiled", compiles_cpu=True)
    labels = torch.randint(-1, 3, (3, 300))
    words = torch.randint(1 << 62, (2, 3, 64))
    with torch.inference_mode():
        inference = torch.randint(1 << 62, (2, 3, 64))
        compiled(labels.clone(), **ASKED, words=inference)
    for layout in (words, inference, words.mT.contiguous().mT):
        compiled(labels, **ASKED, words=layout)
    assert compiled.num_graphs <= 2
    assert not compiled.is_eager


def test_on_a_cpu_numpy_samples_and_it_says_so(caplog):
    caplog.set_level("INFO")
    compiled_module._say_once.cache_clear()
    sampler, labels = build_label_sampler("compiled"), torch.randint(-1, 3, (3, 300))
    words = torch.randint(1 << 62, (2, 3, 64))
    expected = build_label_sampler("static")(labels, **ASKED, words=words)
    for _ in range(2):
        assert torch.equal(sampler(labels, **ASKED, words=words).index, expected.index)
    assert sampler.num_graphs == 0
    assert not sampler.is_eager
    assert caplog.text.count("sampled by its kernel: there is nothing to compile") == 1


def test_nothing_to_sample_is_no_failure_to_compile():
    compiled = build_label_sampler("compiled", compiles_cpu=True)
    for labels, num_samples in ((torch.zeros(2, 0), 4), (torch.zeros(0, 5), 4), (torch.ones(5), 0)):
        asked = {"num_samples": num_samples, "positive_fraction": 0.5, "bg_label": 0}
        assert not compiled(labels.long(), **asked).is_valid.any()
    assert not compiled.is_eager
    assert compiled.num_graphs == 0


@needs_inductor
@pytest.mark.parametrize("impl", ["static", "compiled"])
def test_in_a_graph_of_the_callers(impl):
    """One graph for all sizes of long rows, and the samples that it has outside."""
    sampler = build_label_sampler(impl)

    @torch.compile(fullgraph=True, dynamic=True)
    def picked(labels, words):
        return labels.gather(1, sampler(labels, **ASKED, words=words).index)

    for rows, n in ((2, 3000), (3, 7001)):
        labels = torch.randint(-1, 3, (rows, n)).to(torch.int8)
        words = torch.randint(1 << 62, (2, rows, 64))
        expected = labels.gather(1, sampler(labels, **ASKED, words=words).index)
        assert torch.equal(picked(labels, words), expected)


@needs_inductor
def test_a_copy_compiles_its_own():
    compiled = build_label_sampler("compiled", compiles_cpu=True)
    compiled(torch.ones(2, 9, dtype=torch.int64), **ASKED)
    assert compiled.num_graphs
    for clone in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert clone.num_graphs == 0


SCRIPT = """
import torch
from d2_static_sampler.samplers import build_label_sampler
sampler = build_label_sampler("compiled", compiles_cpu=True)
labels = torch.randint(-1, 3, (2, 300))
for _ in range(3):
    sample = sampler(labels, num_samples=32, positive_fraction=0.5, bg_label=0)
assert sample.num_pos.tolist() == [16, 16] and sampler.is_eager
"""
BROKEN = {
    "no compiler": {"PATH": "{tmp}", "TORCHINDUCTOR_CACHE_DIR": "{tmp}/cache"},
    "no cache": {"TORCHINDUCTOR_CACHE_DIR": "/proc/nothing"},
    # Read when torch is imported: not in a process that is forked.
    "no dynamo": {"TORCHDYNAMO_DISABLE": "1"},
    "no compile": {"TORCH_COMPILE_DISABLE": "1"},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_where_it_cannot_compile_it_warns_once_and_stays_static(broken, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    for key, value in BROKEN[broken].items():
        monkeypatch.setenv(key, value.format(tmp=tmp_path))
    (script := tmp_path / "script.py").write_text(SCRIPT)
    if "DISABLE" in next(iter(BROKEN[broken])):
        command = [sys.executable, str(script)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    else:
        run = run_script([str(script)], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("runs uncompiled from here on") == 1
    assert "C++ compiler" in run.stderr
    assert "Traceback" not in run.stderr
