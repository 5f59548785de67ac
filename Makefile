# Everything a newcomer needs: `make train` and `make test`. Each sets up what it lacks.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NUM_PROCESSES ?= 2
CONFIG ?= configs/quickstart.yaml
RUN ?= runs/quickstart
MEDIA ?= sample_data/media

export OMP_NUM_THREADS ?= 1

.PHONY: env data train report test stress test-gpu lint clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AdaptiveLoad needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	# Without minutes of nvcc: the quickstart and CI have no GPU. `pip install -e .` compiles the kernels.
	ADAPTIVELOAD_BUILD_KERNELS=0 $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

data: sample_data/latents/dataset.json

sample_data/latents/dataset.json: | $(VENV)/.installed
	$(BIN)/python -m scripts.sample_media --output sample_data/media
	$(BIN)/python -m scripts.prepare --input sample_data/media --output sample_data/latents --codec dct --config configs/data/quickstart.yaml

train: env data
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m scripts.launch --config_file configs/accelerate/cpu.yaml --num_processes $(NUM_PROCESSES) train.py $(CONFIG)
	$(MAKE) report

report: env
	$(BIN)/python -m scripts.sample --run $(RUN) --media $(MEDIA)
	$(BIN)/python -m scripts.report --run $(RUN)

test: env lint
	# Two at a time, file by file, in the order of tests/conftest.py and not by the number of a file's tests.
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not stress"

stress: env
	$(BIN)/python -m pytest -m stress

test-gpu:
	$(PYTHON) -m pytest -m gpu

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf runs sample_data build dist
