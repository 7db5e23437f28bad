# Needs Python 3.11-3.13 with venv, and make. `make demo` and `make test` set up everything else in .venv.
PYTHON ?= python3
VENV ?= .venv
# On x86 Linux a bare `pip install torch` brings gigabytes of CUDA packages that llmc does not use. Offer pip the CPU
# wheel, and it is preferred, for it has the higher version (2.13.0+cpu):
#     make test PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# or keep the wheel in a folder: make test PIP_FIND_LINKS=/path/to/wheels
TORCH ?= torch==2.13.0
# Processes that run tests; each takes a core and about 1.5 GB.
JOBS ?= 2

# Neither the engine nor the libraries call home.
export ORT_DISABLE_TELEMETRY := 1
export HF_HUB_OFFLINE := 1
# torch's threads sleep while they wait: two test processes would take each other's cores by spinning.
export OMP_WAIT_POLICY := passive

BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU ?= .venv-gpu
SERVES := $(VENV)/.serves

.PHONY: demo test check format gpu clean gpu-library

demo: $(SERVES)  ## fetch SmolLM2-135M, export, build (int8, int4), ask it something; offline the model of recipes/tiny
	$(BIN)/python recipes/demo.py

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

# Tests of the CUDA session then run on the real provider, without a GPU.
gpu-library: $(READY)  ## fetch ONNX Runtime's library for GPUs, 255 MB, into build/gpu-library
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/gpu-library \
		onnxruntime-gpu==1.31.1

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(GPU)/.ready  ## on a machine with an NVIDIA GPU: all that recipes/gpu_kit asks of it
	$(GPU)/bin/python recipes/gpu_kit/make_parts.py --bundles .gpu_kit/here
	$(GPU)/bin/python recipes/gpu_kit/kit.py A B C --work .gpu_kit/here --out gpu_kit_results

clean:
	rm -rf $(VENV) $(GPU) .gpu_kit build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SERVES): pyproject.toml
	@echo "setting up $(VENV): torch and others, about 2 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cpu,export,serve]"
	touch $@

$(GPU)/.ready: pyproject.toml
	@echo "setting up $(GPU): torch with CUDA and others, about 8 GB, some minutes"
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[gpu,export,tensorrt-rtx]"
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check transformers safetensors pytest hypothesis
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nxrt-ep-cuda==0.1.0.dev6
	touch $@

$(READY): $(SERVES)
	@echo "adding what the tests need, about 1 GB"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cpu,export,dev]"
	touch $@
