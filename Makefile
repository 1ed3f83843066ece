# Every target does its own set-up; only Python >= 3.11 and make are needed.
#   make demo PYTHON=/path/to/python   chooses the Python (and with it an installed torch)

PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
JOBS ?= 2
BIN := .venv/bin
# The plugins are named so that those of another Python's packages stay out. One thread per
# worker: more only compete for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --disable-plugin-autoload -p xdist -p timeout \
	-p hypothesispytest -n $(JOBS) --dist worksteal --timeout 300

# On a machine with a GPU, with the chosen Python's own torch, Triton and pytest (plugins xdist,
# timeout, hypothesis), not .venv. Compiling kernels takes most of the time, so every core gets a
# worker; each works through neighbouring tests, which share kernels, and Triton's cache on disk
# serves all. A stuck kernel can only be left by ending its process.
GPU_JOBS ?= $(shell nproc)
SHARD = $(sort $(shell grep -rl --include='test_*.py' 'mark[.]gpu' tests))
GPU_RESULTS ?= benchmarks/results/gpu_tests.json
GPU_PYTEST = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=src:tests$${PYTHONPATH:+:$$PYTHONPATH} \
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p xdist -p timeout -p hypothesispytest -p gpu_results \
	-n $(GPU_JOBS) --dist worksteal --timeout 120 --timeout-method thread -m gpu

.PHONY: help demo test test-full test-gpu test-vllm test-sglang test-page test-cluster docs plots lint format clean

help:
	@echo 'make demo       generate with the bundled model, then compare with plain decoding'
	@echo 'make test       linters and tests, 8 minutes of processor time; TESTS=paths runs a part'
	@echo 'make test-full  linters and all tests that need no GPU; writes tests/results/test-full.txt'
	@echo 'make test-gpu   tests on a GPU with PYTHON as it is; SHARD=paths runs a part'
	@echo 'make test-vllm, make test-sglang'
	@echo '                against the released wheels, which are downloaded (336 and 39 MB)'
	@echo 'make test-page  the page in Chromium, which has to be there, and Playwright in .venv'
	@echo 'make test-cluster  replicas on Ray Serve, which has to be in .venv; some minutes, 1.2 GB'
	@echo 'make docs       the documents as a site in build/site; a link that leads nowhere fails'
	@echo 'make plots      the plots of the documents, from benchmarks/results'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     ruff format and the fixes that ruff can make'
	@echo 'make clean      remove the virtual environment and caches'

.venv/.ready-engine: requirements/engine.txt requirements/torch.txt pyproject.toml tools/setup_venv.py
	@test -n '$(PYTHON)' || { echo 'setup: error: no Python 3.11 or newer found' >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py .venv requirements/engine.txt
	@touch $@

.venv/.ready-dev: .venv/.ready-engine requirements/dev.txt requirements/triton.txt
	@$(PYTHON) tools/setup_venv.py --with-triton .venv requirements/dev.txt
	@touch $@

.venv/.ready-docs: .venv/.ready-dev requirements/docs.txt
	@$(PYTHON) tools/setup_venv.py .venv requirements/docs.txt
	@touch $@

demo: .venv/.ready-engine
	@$(BIN)/hybridspec generate "class Queue:" --max-tokens 100
	@echo
	@$(BIN)/hybridspec compare --num-prompts 4 --max-tokens 64

test: .venv/.ready-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(PYTEST) -m 'not gpu and not slow and not browser' $(TESTS)

test-full: lint
	@mkdir -p tests/results
	@$(PYTEST) -m 'not gpu and not browser and not cluster' --timeout 1800 --result-file tests/results/test-full.txt

test-gpu:
	@$(GPU_PYTEST) --gpu-results=$(GPU_RESULTS) $(SHARD)

# Another project's released wheel without what it depends on; its Python files are kept.
.venv/releases/vllm: | .venv/.ready-dev
	@$(BIN)/python tools/fetch_release.py 'vllm==0.33.*' $@

.venv/releases/sglang: | .venv/.ready-dev
	@$(BIN)/python tools/fetch_release.py 'sglang==0.5.23' $@

test-vllm: .venv/releases/vllm
	@VLLM_RELEASE=$(CURDIR)/.venv/releases/vllm $(PYTEST) -o filterwarnings=default \
		tests/releases/check_vllm.py

test-sglang: .venv/releases/sglang
	@SGLANG_RELEASE=$(CURDIR)/.venv/releases/sglang $(PYTEST) -o filterwarnings=default \
		tests/releases/check_sglang.py

test-page: .venv/.ready-dev
	@$(PYTEST) -m browser tests/serve/test_page.py

docs: .venv/.ready-docs
	@$(BIN)/python -m mkdocs build --quiet --strict
	@echo 'build/site/index.html'

plots: .venv/.ready-dev
	@$(BIN)/python benchmarks/plots.py

# One worker: every Ray takes a minute to start and 1.2 GB.
test-cluster: .venv/.ready-dev
	@$(PYTEST) -n 1 -m cluster --timeout 900 tests/serve

lint: .venv/.ready-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/.ready-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache src/*.egg-info
