# Two commands matter on a fresh machine: `make demo` and `make test`. Both install what they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

ENGINE ?= simulator        # of the demo: simulator | sglang (the real one, on the CPU); of test-engine: sglang | vllm
CLUSTER ?= lab             # lab | current (what kubectl points to)
NAME ?= demo               # name of the demo's lab
WITH ?=                    # keda,prometheus: what else the demo's lab has
IMAGE ?= shoal:dev
DEV ?=                      # 1: an image with the engine simulator
PYTEST_ARGS ?=
WORKERS ?= 2               # test processes side by side in the lab; each makes labs of its own
UNIT_WORKERS ?= 3          # and without a lab, where they wait for a part of their time: for 2 cores
REQUESTS ?= 200000         # of a storm
SEED ?= 1                  # of a storm
DRIVER ?= BuiltIn          # of a storm: BuiltIn | KEDA
FROM ?=                    # of a storm: the version that is installed first, and upgraded under load
KILLS ?= 100               # of gateways and the ledger in storm-tenants

# uv from PATH, else a private copy beside the project.
UV := $(shell command -v uv 2>/dev/null || echo .venv-uv/bin/uv)
RUN := $(UV) run --frozen

# pytest writes each test file's byte code once, not in each process of each lane.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv-uv/bin/uv:
	@echo "uv is not on PATH: installing a private copy into .venv-uv"
	@python3 -m venv .venv-uv && .venv-uv/bin/pip install --quiet uv

.PHONY: setup
setup: $(filter .venv-uv/%,$(UV)) ## Install the Python environment (locked)
	@$(UV) sync --frozen --quiet --compile-bytecode
	@$(RUN) python -m compileall -q operator  # containers of the lab run as a user who cannot write byte code

.PHONY: demo
demo: setup ## Serve Models end to end, ask one, place five on a mixed fleet, scale one from zero and back, swap adapters (ENGINE=simulator|sglang, CLUSTER=lab|current, WITH=keda)
	@$(RUN) shoal demo up --engine $(strip $(ENGINE)) --cluster $(strip $(CLUSTER)) --name $(strip $(NAME)) --with "$(strip $(WITH))"

.PHONY: demo-down
demo-down: setup ## Remove everything that `make demo` made
	@$(RUN) shoal demo down --cluster $(strip $(CLUSTER)) --name $(strip $(NAME))

.PHONY: test
test: setup ## Lint, types, generated files, and all tests that fit on one machine
	@# pyright keeps one core busy, and a build waits for its downloads. `-o setup`: it is done.
	@$(MAKE) --no-print-directory -j2 -o setup lint typecheck verify binaries
	@# The lab's tests wait for half of their time. Those without a lab run meanwhile, with less right to the CPU.
	@$(MAKE) --no-print-directory -j2 -o setup beside-unit beside-lab

.PHONY: beside-unit beside-lab
beside-unit: LOWER := nice -n 5
beside-unit beside-lab:
	@$(LOWER) $(MAKE) --no-print-directory -o setup $(@:beside-%=test-%) 2>&1 | sed -u 's/^/$(@:beside-%=%) | /'

.PHONY: binaries
binaries: setup ## Build what the lab and the charts' tests run (Kubernetes and helm, once: about 10 minutes on 2 cores)
	@$(RUN) shoal lab binaries

.PHONY: test-unit
test-unit: setup ## Tests that need neither root nor a lab
	@$(RUN) pytest -n $(strip $(UNIT_WORKERS)) --dist loadfile -m "not lab and not engine and not apiserver and not mutation and not keda and not karpenter and not kueue and not release and not faults" $(PYTEST_ARGS)

.PHONY: test-release
test-release: setup models binaries ## A release without publishing, and what it made: installed, run, pushed to a registry here (4 minutes)
	@$(RUN) pytest -m release $(PYTEST_ARGS)

.PHONY: test-lab
test-lab: setup models binaries ## Tests on real API servers and on the lab (the lab needs root; about 20 minutes on 2 cores)
	@$(RUN) pytest -n $(strip $(WORKERS)) --dist loadfile -m "(lab or apiserver) and not long and not engine and not mutation and not keda and not karpenter and not kueue and not faults" $(PYTEST_ARGS)

.PHONY: test-lab-long
test-lab-long: setup models binaries ## The lab's long tests: the operator killed at every write, rollouts under load, boards, traces, node cache, lost nodes (20 minutes)
	@$(RUN) pytest -n $(strip $(WORKERS)) --dist loadfile -m "lab and long and not engine and not mutation and not keda and not karpenter and not kueue and not faults" $(PYTEST_ARGS)

.PHONY: test-engine
test-engine: setup models ## The contract suite on a real engine, on the CPU (ENGINE=sglang|vllm; installs it: 0.7 or 1 GB)
	@UV=$(abspath $(UV)) images/engine-cpu/$(if $(filter vllm,$(strip $(ENGINE))),install-vllm.sh,install.sh)
	@$(RUN) pytest -m "engine and $(if $(filter vllm,$(strip $(ENGINE))),vllm,not vllm)" $(PYTEST_ARGS)

.PHONY: test-keda
test-keda: setup models ## The driver KEDA on the real KEDA and Prometheus (builds KEDA once: about 10 minutes on 2 cores)
	@$(RUN) shoal lab binaries --with keda,prometheus
	@$(RUN) pytest -m keda $(PYTEST_ARGS)

.PHONY: test-karpenter
test-karpenter: setup models binaries ## Nodes that an autoscaler adds, by the real Karpenter (builds it once: about 4 minutes on 2 cores)
	@$(RUN) pytest -m karpenter $(PYTEST_ARGS)

.PHONY: test-kueue
test-kueue: setup models binaries ## Replicas that wait for a queue's quota, by the real Kueue (needs root; builds it once: about 8 minutes on 2 cores)
	@$(RUN) pytest -m kueue $(PYTEST_ARGS)

.PHONY: test-faults
test-faults: setup models binaries ## Faults injected into a lab at every layer, and what `why` and `doctor` say of them (needs root)
	@$(RUN) pytest -m faults $(PYTEST_ARGS)

.PHONY: test-storm
test-storm: setup models binaries ## Storms with one protection switched off each: they must find what is wrong (10 minutes)
	@$(RUN) pytest -m mutation $(PYTEST_ARGS)

.PHONY: test-kubelet
test-kubelet: setup models ## The pod life-cycle suite, and a DRA driver, on a real kubelet with containerd (needs root and Debian packages)
	@$(RUN) python -m tests.kubelet $(PYTEST_ARGS)

.PHONY: storm
storm: setup models binaries ## Requests against the lab while things are killed; fails if one is lost (REQUESTS=200000 SEED=1 FROM=v0.1.0)
	@$(RUN) python -m tests.storm --requests $(strip $(REQUESTS)) --seed $(strip $(SEED)) --driver $(strip $(DRIVER)) \
		$(if $(strip $(FROM)),--from $(strip $(FROM)))

.PHONY: storm-tenants
storm-tenants: setup models ## Gateways and the ledger are killed under load; fails if a usage record is lost or double (KILLS=100)
	@$(RUN) python -m tests.storm.tenants --kills $(strip $(KILLS)) --seed $(strip $(SEED))

.PHONY: bench
bench: setup ## Print the figures: gateway beside Envoy and smg, routing, sizing, packing, cache, fetching, lab, operator (SHOAL_TRACES=folder of the traces)
	@$(UV) sync --frozen --quiet --group bench
	@$(RUN) --group bench python -m tests.bench

.PHONY: models
models: setup ## Make the tiny models that the image, the demo and the tests serve
	@$(RUN) python images/shoal/make_models.py

.PHONY: generate
generate: setup ## Write crds/, chart schemas and the reference docs from the code
	@$(RUN) shoal generate

.PHONY: verify
verify: setup ## Fail when generated files are not what the code says
	@$(RUN) shoal generate --check

.PHONY: lint
lint: setup ## Format check, lint, import layers
	@$(RUN) ruff format --check --quiet operator tests images
	@$(RUN) ruff check --quiet operator tests images
	@out=$$($(RUN) lint-imports --no-logo) || { echo "$$out"; exit 1; }

.PHONY: typecheck
typecheck: setup ## pyright, strict
	@$(RUN) pyright --warnings

.PHONY: format
format: setup ## Format and fix what can be fixed
	@$(RUN) ruff format operator tests images
	@$(RUN) ruff check --fix operator tests images

.PHONY: chart
chart: setup ## Lint and package the charts into dist/
	@$(RUN) python -m shoal_dev.release charts

.PHONY: release-dry-run
release-dry-run: setup models ## Build and check all that a release publishes, into dist/; publish nothing (docs/releasing.md)
	@$(RUN) python -m shoal_dev.release dry-run

.PHONY: image
image: models ## Build Shoal's image with docker, podman or buildah (IMAGE=name:tag; DEV=1 adds the engine simulator)
	@DEV="$(strip $(DEV))" images/shoal/build.sh $(IMAGE)

.PHONY: clean
clean: ## Remove caches inside the checkout
	@rm -rf dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
