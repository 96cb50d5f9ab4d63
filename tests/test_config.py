"""A wrong value of ``MODEL.SAMPLER``, from whichever door it comes, is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode, LazyCall, get_cfg
from detectron2.config import instantiate as instantiate_lazy
from omegaconf import OmegaConf

from d2_static_sampler import (
    LABEL_SAMPLER_REGISTRY,
    SamplerHook,
    add_sampler_config,
    build_label_sampler,
    install_sampler,
    sample_balanced,
    subsample_labels,
    uninstall_sampler,
)
from d2_static_sampler.config import check_sampler_config
from d2_static_sampler.lazy import yaml_config
from d2_static_sampler.modeling import has_static_step, installed_samplers
from d2_static_sampler.samplers import StaticSampler
from tests.helpers import small_config, small_model

NAMES = "choose one of: compiled, naive, static"
FLAGS = "choose one of: True, False"
# Of each key: what stands behind its value in the error, and values of the right type.
CHOICES = {
    "IMPL": (NAMES, ["fast", ""]),
    "SELECT": ("choose one of: auto, rank, topk", ["fast"]),
    "STATIC_STEP": (FLAGS, []),
    "TIMING": (FLAGS, []),
    "SEED": ("choose -1, or an integer from 0 to 2**63 - 1", [-2, 2**63, 2**70]),
    "LOG_PERIOD": ("choose an integer from 1 to 2**63 - 1", [0, -1, 2**63]),
    "WARMUP_ITERS": ("choose an integer from 0 to 2**63 - 1", [-1, 2**63]),
}
OF_ANY_TYPE = (None, 1, True, 1.5, float("nan"), "True", "1", [], (), {})
USUAL = {"IMPL": str, "SELECT": str, "STATIC_STEP": bool, "TIMING": bool}
WRONG = [
    (key, value)
    for key, (_, values) in CHOICES.items()
    for value in [*(x for x in OF_ANY_TYPE if type(x) is not USUAL.get(key, int)), *values]
]


def line_of(error, function, *args, **options):
    """What ``function`` says; in one line."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def model():
    return install_sampler(small_model(), "static")


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_assigned_in_python(model, key, value):
    cfg = small_config("MODEL.SAMPLER.IMPL", "static")
    # As an assignment does it; yacs refuses some types there, others it takes.
    dict.__setitem__(cfg.MODEL.SAMPLER, key, value)
    expected = f"MODEL.SAMPLER.{key} is {value!r}; {CHOICES[key][0]}"
    assert line_of(ValueError, check_sampler_config, cfg) == expected
    assert line_of(ValueError, install_sampler, model, cfg) == expected
    assert line_of(ValueError, SamplerHook, cfg) == expected
    assert len(installed_samplers(model)) == 2


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_in_a_lazy_config(key, value):
    lazy = OmegaConf.create({"sampler": {"impl": "static"}}, flags={"allow_objects": True})
    lazy.sampler[key.lower()] = value
    message = line_of(ValueError, yaml_config, lazy)
    shown = list(value) if value == () else value  # a tuple is a list there
    assert message == f"sampler.{key.lower()} is {shown!r}; {CHOICES[key][0]}"


@pytest.mark.parametrize("door", ["command line", "file"])
@pytest.mark.parametrize(("key", "value"), [x for x in WRONG if x[1] not in ((), {})])
def test_merged(tmp_path, key, value, door):
    """yacs refuses some of it as it merges, in a line with key and value; the check the rest."""
    if door == "file" and value in ("True", "1"):
        pytest.skip("yacs makes True and 1 of such strings")
    path = tmp_path / "config.yaml"
    path.write_text(CfgNode({"MODEL": {"SAMPLER": {key: value}}}).dump())

    def read():
        cfg = small_config("MODEL.SAMPLER.IMPL", "static")
        if door == "file":
            cfg.merge_from_file(str(path))
        else:
            cfg.merge_from_list([f"MODEL.SAMPLER.{key}", repr(value)])
        check_sampler_config(cfg)

    if isinstance(value, float) and value != value and door == "command line":
        value = "nan"  # no literal of Python
    message = line_of(ValueError, read)
    assert f"MODEL.SAMPLER.{key}" in message
    assert str(value) in message


def test_right_values(model):
    for key, values in {
        "SEED": [-1, 0, 2**63 - 1],
        "LOG_PERIOD": [1, 10**12],
        "WARMUP_ITERS": [0],
        "STATIC_STEP": [False, True],
        "TIMING": [False],
    }.items():
        for value in values:
            cfg = small_config("MODEL.SAMPLER.IMPL", "static", f"MODEL.SAMPLER.{key}", value)
            SamplerHook(cfg)
            install_sampler(model, cfg)
    seed = np.int64(3)
    heads = installed_samplers(install_sampler(model, "static", seed=seed)).values()
    assert [head.seed for head in heads] == [3, 3]


@pytest.mark.parametrize("value", ["static", None, 3, []])
def test_a_node_that_is_none(model, value):
    cfg = get_cfg()
    dict.__setitem__(cfg.MODEL, "SAMPLER", value)
    expected = f"MODEL.SAMPLER is {value!r}; set one of its keys: IMPL, LOG_PERIOD, SEED, "
    for function, args in (
        (add_sampler_config, (cfg,)),
        (check_sampler_config, (cfg,)),
        (install_sampler, (model, cfg)),
    ):
        assert line_of(ValueError, function, *args).startswith(expected)


@pytest.mark.parametrize("value", [None, 3, "static", StaticSampler, {}, CfgNode()])
def test_what_is_no_config(value):
    for function in (add_sampler_config, check_sampler_config, SamplerHook):
        assert "expected a config" in line_of(TypeError, function, value)
    assert "expected a Lazy config" in line_of(TypeError, yaml_config, value)
    if value != "static":
        assert "MODEL.SAMPLER" in line_of(TypeError, build_label_sampler, value)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (None, "sampler is None; set one of its keys: impl, "),
        ([], "sampler is []; set one of its keys: impl, "),
        ({"impl": "???"}, "sampler.impl"),
        ({"seed": "${no.such}"}, "no.such"),
        ({"ipml": "static"}, "sampler has 'ipml'; choose one of: impl, log_period, "),
        ({3: "static"}, "sampler has 3; choose one of: impl, "),
    ],
)
def test_odd_lazy_nodes(sampler, message):
    assert message in line_of(ValueError, yaml_config, OmegaConf.create({"sampler": sampler}))


class Mine:
    """A sampler of a user's."""

    def __init__(self):
        self.static = build_label_sampler("static")

    def __call__(self, labels, **arguments):
        return self.static(labels, **arguments)


EXPECTED = "expected a config, one of compiled, naive, static, or a sampler, not "
ARGUMENTS = [
    ((None,), {}, TypeError, EXPECTED + "None"),
    ((3,), {}, TypeError, EXPECTED + "3"),
    ((True,), {}, TypeError, EXPECTED + "True"),
    (([],), {}, TypeError, EXPECTED + "[]"),
    (({"IMPL": "static"},), {}, TypeError, EXPECTED + "{'IMPL': 'static'}"),
    (("",), {}, ValueError, "MODEL.SAMPLER.IMPL is ''; " + NAMES),
    (("fast",), {"static_step": True}, ValueError, "MODEL.SAMPLER.IMPL is 'fast'; " + NAMES),
    ((StaticSampler,), {}, TypeError, "StaticSampler makes samplers and is none: pass StaticS"),
    ((Mine,), {}, TypeError, "Mine makes samplers and is none: pass Mine(), or its registered"),
    (
        (LABEL_SAMPLER_REGISTRY.get("static"),),
        {},
        TypeError,
        "static makes samplers and is none: pass static(), or its registered name",
    ),
    ((subsample_labels,), {}, TypeError, "words=...): got an unexpected keyword argument 'words'"),
    (
        (lambda labels: None,),
        {},
        TypeError,
        "cannot be called as sampler(labels, num",
    ),
    (("static",), {"static_step": "False"}, ValueError, "static_step is 'False'; " + FLAGS),
    (("static",), {"static_step": 1}, ValueError, "static_step is 1; " + FLAGS),
    (("static",), {"seed": True}, ValueError, "seed is True; choose -1, or an integer from 0 to"),
    (("static",), {"seed": 1.0}, ValueError, "seed is 1.0; choose -1, or an integer"),
    (("static",), {"seed": "1"}, ValueError, "seed is '1'; choose -1, or an integer"),
    (("static",), {"seed": 2**63}, ValueError, "choose -1, or an integer from 0 to 2**63 - 1"),
    (("naive",), {"seed": -2}, ValueError, "seed is -2; choose -1, or an integer"),
    (("naive",), {"static_step": True}, ValueError, "'naive', which leaves the whole step to Det"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), ARGUMENTS)
def test_arguments_of_install_sampler(model, args, options, error, message):
    install_sampler(model, "static")
    before = {module: sampler.sampler for module, sampler in installed_samplers(model).items()}
    assert message in line_of(error, install_sampler, model, *args, **options)
    after = {module: sampler.sampler for module, sampler in installed_samplers(model).items()}
    assert after == before


def test_configs_that_are_not_whole_and_arguments_in_another_order(model):
    cfg = small_config("MODEL.SAMPLER.IMPL", "static")
    message = line_of(TypeError, install_sampler, model, cfg.MODEL.SAMPLER)
    assert message == "expected the whole config, not its MODEL.SAMPLER alone: pass cfg"
    assert "call add_sampler_config(cfg)" in line_of(ValueError, install_sampler, model, get_cfg())
    assert "call add_sampler_config(cfg)" in line_of(ValueError, SamplerHook, get_cfg())
    for function, args in ((install_sampler, (cfg, model)), (uninstall_sampler, (cfg,))):
        message = line_of(TypeError, function, *args)
        assert "expected a model (torch.nn.Module) as the first argument, not CfgNode" in message
    assert "not None" in line_of(TypeError, uninstall_sampler, None)
    assert "not a model (GeneralizedRCNN)" in line_of(TypeError, install_sampler, model, model)


def test_a_static_step_on_top_of_a_naive_config(model):
    cfg = small_config("MODEL.SAMPLER.IMPL", "naive")
    message = line_of(ValueError, install_sampler, model, cfg, static_step=True)
    assert message.endswith("choose one of: compiled, static; or MODEL.SAMPLER.STATIC_STEP False")
    own = install_sampler(small_model(), Mine(), static_step=True)
    assert has_static_step(own)


@pytest.mark.parametrize("value", [0, -3, None, True, 2.0, "20"])
def test_the_writers_period(value):
    message = line_of(ValueError, SamplerHook, small_config(), writer_period=value)
    assert message == f"writer_period is {value!r}; choose an integer from 1 to 2**63 - 1"


def test_options_of_samplers():
    build = build_label_sampler
    labels = torch.ones(4, dtype=torch.int64)
    asked = {"num_samples": 2, "positive_fraction": 0.5, "bg_label": 0}
    assert "select is None; choose one of" in line_of(ValueError, build, "static", select=None)
    assert "not 'False'" in line_of(TypeError, build, "compiled", compiles_cpu="False")
    assert "'selct'" in line_of(TypeError, build, "static", selct="rank")
    assert "impl is []; choose one of" in line_of(
        ValueError, sample_balanced, torch.rand(4, 2), labels, 2, impl=[]
    )
    for name, value in (("positive_fraction", "a"), ("num_samples", 1.5), ("bg_label", None)):
        message = line_of(TypeError, build("static"), labels, **{**asked, name: value})
        assert message.startswith(f"{name} must be ")
        assert message.endswith(repr(value))


def test_a_lazy_config_that_installs_in_its_model():
    call = LazyCall(install_sampler)(
        model=LazyCall(torch.nn.Identity)(), cfg_or_name_or_sampler="static", static_step="False"
    )
    assert "static_step is 'False'; choose one of" in line_of(ValueError, instantiate_lazy, call)
