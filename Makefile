# Every target works alone on a fresh machine: what it needs of .venv is made first.
PYTHON ?= python3
TORCH ?= torch==2.14.1 torchvision==0.29.1
IMPL ?= static
OPTS ?=
DETECTRON2_DIR ?=
# By default OpenMP threads wait by spinning for milliseconds. On a CPU that another process uses
# too, that makes a training step ten times slower; waiting briefly costs a tenth on a quiet one.
export GOMP_SPINCOUNT ?= 1000

# Python keeps what it compiles, whatever this says outside: nothing in .venv is compiled beforehand.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python tools/install_packages.py
STAMP := .venv/.setup-done
DEV_STAMP := .venv/.dev-setup-done
# Two processes with one thread each. A file's tests stay together: they share what they build.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup train test lint bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## make .venv with torch, this package and Detectron2 (PYTHON=python3)

# The torch wheels are gigabytes: their time is told apart. The first import compiles torch's files,
# which takes longer than downloading the rest: both at once. A Detectron2 that is in .venv already
# is kept; `make clean` before `make setup` installs it anew.
$(STAMP): pyproject.toml tools/install_packages.py tools/install_detectron2.py
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	@set -e; unset PYTHONPATH; begin=$$(date +%s); \
	echo "setup: .venv from $(PYTHON)"; $(PYTHON) -m venv .venv; \
	$(PIP) install "uv>=0.5" || echo "setup: no uv here, pip installs everything (slower)"; \
	echo "setup: $(TORCH) (gigabytes)"; torch=$$(date +%s); \
	$(INSTALL) $(TORCH) "setuptools<81" wheel; torch=$$(($$(date +%s) - torch)); \
	echo "setup: this package and Detectron2"; $(BIN)/python -c "import torchvision" & \
	$(INSTALL) --no-build-isolation --editable .; \
	$(BIN)/python tools/install_detectron2.py; wait; \
	echo "setup: torch took $$torch s, the rest $$(($$(date +%s) - begin - torch)) s"
	@touch $@

# What `make test` and `make lint` need besides.
$(DEV_STAMP): $(STAMP)
	@rm -f $@
	@echo "setup: tools for tests and linting"
	@unset PYTHONPATH; $(INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

train: $(STAMP)  ## train on the built-in data set (IMPL=static|compiled|naive, OPTS="KEY VALUE ...")
	$(BIN)/python tools/train_net.py --config-file configs/quick/faster_rcnn_R_18_FPN_shapes.yaml \
		OUTPUT_DIR output/shapes_$(IMPL) MODEL.SAMPLER.IMPL $(IMPL) $(OPTS)

test: $(DEV_STAMP)  ## run the tests (OPTS="-k words", DETECTRON2_DIR=checkout to test against)
ifneq ($(DETECTRON2_DIR),)
	@test -f "$(DETECTRON2_DIR)/detectron2/__init__.py" \
		|| { echo "DETECTRON2_DIR=$(DETECTRON2_DIR) is no Detectron2 checkout" >&2; exit 1; }
	PYTHONPATH="$$(cd "$(DETECTRON2_DIR)" && pwd)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTEST) $(OPTS)
else
	$(PYTEST) $(OPTS)
endif

lint: $(DEV_STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure everything at small sizes, into output/bench (under 5 minutes)
	$(BIN)/python tools/benchmark_sampler.py --work small --select rank topk --rounds 5 \
		--csv output/bench/sampler.csv
	$(BIN)/python tools/benchmark_train.py --synthetic 160 160 --images 2 --steps 12 --warmup 3 \
		--csv output/bench/train.csv
	$(BIN)/python tools/profile_step.py --images 1 2 --output output/bench/profile
	$(BIN)/python tools/plot_results.py output/bench/sampler.csv output/bench/train.csv

clean:  ## remove .venv, builds and caches (data sets and outputs stay)
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
