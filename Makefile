# `make` lists the targets. Tests need root for mounts and loop devices: for other users, only the test
# programs run with sudo.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PATH := $(HOME)/.cargo/bin:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin:$(PATH)

CARGO := cargo
# Leaves the tests that have passed out of the output of cargo.
WITHOUT_PASSED := sed --unbuffered '/^test .* \.\.\. ok$$/d; /^$$/d'
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
LOGS := $(TARGET)/test-logs
CARGO_DENY := 0.20.2
ifeq ($(shell id -u),0)
AS_ROOT :=
else
AS_ROOT := sudo --preserve-env env PATH=$(PATH)
# cargo builds as the user, and tests/runner starts what it built as root.
TESTS_AS_ROOT := SLACKWATER_TEST_SUDO=1
endif

.PHONY: help
help: ## Print this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Build the driver and show it: create, use and delete volumes of every kind on a temporary pool
	@deploy/deps demo
	$(CARGO) build --release --locked
	@$(AS_ROOT) $(TARGET)/release/slackwater demo

# The random calls of the tests, and the part of a sweep that runs, follow from the commit: a run can be repeated,
# and another commit has others. `make quick` and `make soak` choose new ones each time.
SEED = $(shell printf '%d' "0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0)")

# The parts of `make test` after `make check`. Each is a target, and its output is in a log of that name.
# A guest computes on one CPU while the tests on this kernel that need root mostly wait for disks, so these run
# at once. The tests that compute on this kernel follow, and those on simulated thin devices follow the guests.
# csi-sanity with pools that are simulated or in a guest follows these. With pools on loop devices it comes last,
# because some tests let disks die, which every program notices that examines loop devices.
CARGO_PARTS := tests-unprivileged tests-root tests-guest
PARTS_ON_THIS_KERNEL := tests-root tests-unprivileged
PARTS_ELSEWHERE := tests-guest tests-thin sanity-elsewhere
PARTS := $(CARGO_PARTS) tests-thin sanity-elsewhere sanity-here e2e-if-warm

.PHONY: test
test: ## Run all tests, but no benchmarks (as root, or with sudo)
	@deploy/deps test
	@rm -rf $(LOGS) && mkdir -p $(LOGS) && touch $(PARTS:%=$(LOGS)/%.log) $(LOGS)/left.log $(LOGS)/left-out.log $(LOGS)/parts.log
	@$(MAKE) timed-check
	@code=0; MACHINE_LOG=$(LOGS)/left.log tests/machine.sh around $(MAKE) --jobs=1 parts || code=$$?; \
	sed "s/^/duration: /" $(LOGS)/parts.log; \
	tests/summary $$code $(LOGS)/left.log $(LOGS)/left-out.log $(PARTS:%=$(LOGS)/%.log) | tee $(LOGS)/summary.log

.PHONY: parts parts-on-this-kernel parts-elsewhere
parts: helm packages sanity-programs # all parts, also after one has failed
	@code=0; $(MAKE) --jobs=2 --keep-going parts-on-this-kernel parts-elsewhere || code=$$?; \
	$(MAKE) --jobs=1 --keep-going timed-sanity-here timed-e2e-if-warm || code=$$?; exit $$code

parts-on-this-kernel:
	@$(MAKE) --jobs=1 --keep-going $(PARTS_ON_THIS_KERNEL:%=timed-%)

parts-elsewhere:
	@$(MAKE) --jobs=1 --keep-going $(PARTS_ELSEWHERE:%=timed-%)

timed-%: # another target, and how long it took
	@start=$$SECONDS; code=0; $(MAKE) $* || code=$$?; \
	printf '%-18s %5d s\n' $* $$((SECONDS - start)) >>$(LOGS)/parts.log; exit $$code

.PHONY: check
check: fmt-check words typos shell commits lint deny docs ## Check formatting, language, lints, dependencies and docs; needs no root

.PHONY: words
words: ## Look for words that docs/style.md rules out
	@tests/check/words

.PHONY: typos
typos: ## Look for misspelled words
	@tests/check/typos

.PHONY: shell
shell: ## Run shellcheck on all shell scripts
	@tests/check/shell

.PHONY: commits
commits: ## Check the subjects and bodies of the last commits
	@tests/check/commits

.PHONY: fmt-check
fmt-check:
	$(CARGO) fmt --check

.PHONY: lint
lint: ## Run clippy on everything with fault injection, and on what is released without
	$(CARGO) clippy --locked --workspace --all-targets --features fault -- --deny warnings
	$(CARGO) clippy --locked -- --deny warnings

.PHONY: deny
deny: cargo-deny ## Check licenses, bans and sources of dependencies
	$(CARGO) deny --locked check bans licenses sources

.PHONY: audit
audit: cargo-deny ## Check dependencies for known vulnerabilities (needs a network)
	$(CARGO) deny --locked check advisories

.PHONY: cargo-deny
cargo-deny:
	@$(CARGO) deny --version >/dev/null 2>&1 || $(CARGO) install --locked --debug cargo-deny@$(CARGO_DENY)

.PHONY: docs
docs: ## Build the API documentation, without warnings
	RUSTDOCFLAGS='--deny warnings' $(CARGO) doc --locked --no-deps $(TEST_MEMBERS)

.PHONY: tests
tests: $(CARGO_PARTS) tests-thin ## Run cargo test: tests-unprivileged, tests-root, tests-guest (in a guest kernel) and tests-thin

$(CARGO_PARTS) tests-thin: export PROPTEST_RNG_SEED ?= $(SEED)

# A quarter of the sweeps on the simulated host and of the kills in the life of a volume, which the commit selects:
# `make soak` has all of them.
tests-unprivileged tests-root: export SLACKWATER_SWEEP ?= $(shell echo $$(($(SEED) % 4)))/4

# Beside the default members, which are the driver's, also the program that fills volumes: features of
# dependencies are the same with and without it, so nothing is compiled twice.
TEST_MEMBERS := --package slackwater --package slackwater-core --package slackwater-guard --package slackwater-populate --package kubectl-slackwater

# The tests wait for disks more than they compute, so twice as many run at once as there are CPUs.
.PHONY: $(CARGO_PARTS)
$(CARGO_PARTS): tests-%: helm packages
	@mkdir -p $(LOGS); echo "SLACKWATER_SWEEP=$$SLACKWATER_SWEEP PROPTEST_RNG_SEED=$$PROPTEST_RNG_SEED"
	$(TESTS_AS_ROOT) SLACKWATER_TEST_GROUP=$* SLACKWATER_LEFT_OUT=$(LOGS)/left-out.log \
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$((2 * $$(nproc)))} $(CARGO) test --locked --no-fail-fast $(TEST_MEMBERS) --features fault $(if $(filter-out unprivileged,$*),--tests) 2>&1 | tee $(LOGS)/$@.log | $(WITHOUT_PASSED)

# An eighth of the sweeps, which the commit selects: `make soak` has all of them.
.PHONY: tests-thin
tests-thin: ## Run the tests on the simulated host again, with volumes on simulated thin devices
	@mkdir -p $(LOGS)
	@sweep=$${SLACKWATER_SWEEP:-$$((PROPTEST_RNG_SEED % 8))/8}; echo "SLACKWATER_SWEEP=$$sweep PROPTEST_RNG_SEED=$$PROPTEST_RNG_SEED"; \
	SIMULATED_THIN=1 SLACKWATER_SWEEP=$$sweep RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$((2 * $$(nproc)))} \
	$(CARGO) test --locked --no-fail-fast --features fault --test simulated 2>&1 | tee $(LOGS)/$@.log | $(WITHOUT_PASSED)

# The longest tests try every fault, or every false answer, in turn. Here each run has another 64th of their
# trials, whose number is printed; `make soak` has all of them. Only a quarter of the usual inputs is fuzzed. Left
# out are tests that need root or a download other than helm, and tests of the plugin and of the populators that
# start their programs. Many tests run at once, because most of their time they wait.
# With a little optimization the unit tests take less than half the processor time, and a build after a change
# takes as long as without. The first build takes several minutes more, so `make test` does without it.
quick: export FUZZ_INPUTS ?= 5000
quick: export RUST_TEST_THREADS ?= $(shell echo $$((8 * $$(nproc))))
quick: export CLUSTER_CACHE := /dev/null
quick: export PACKAGES_CACHE := /dev/null
.PHONY: quick
quick: ## Run the tests that need neither root nor a kernel, with a part of the long sweeps, another one each time; about a minute
	@export SLACKWATER_SWEEP=$${SLACKWATER_SWEEP:-$$((RANDOM % 64))/64}; echo "SLACKWATER_SWEEP=$$SLACKWATER_SWEEP"; \
	tests/side-by-side --locked --config profile.dev.package.slackwater.opt-level=1 $(TEST_MEMBERS) --features fault --lib --test unprivileged --test kubernetes --test simulated \
	-- --skip descriptor:: --skip ::root_ 2>&1 | $(WITHOUT_PASSED)

.PHONY: helm
helm: # builds helm, which the tests of the chart use
	@tests/cluster/build --helm

# Without them, the tests that use them are left out, and the summary of `make test` names them. In CI, where apt
# is available, that is a failure.
.PHONY: packages
packages: # downloads Prometheus and a registry of images, which tests start
	@tests/packages/get >/dev/null || { \
		echo "tests with Prometheus and with a real registry will be left out"; \
		[ "$${CI:-}" != true ] || ! command -v apt-get >/dev/null; \
	}

.PHONY: soak
soak: ## Run the consistency tests of cuts and clones with thousands of rounds, and every fault (hours)
	$(TESTS_AS_ROOT) SLACKWATER_SOAK=1 SLACKWATER_SWEEP=full PROPTEST_CASES=20000 $(CARGO) test --locked --no-fail-fast --features fault --test root --test simulated --test unprivileged -- cut:: host_linux:: guard:: databases:: kill:: across::clones:: across::copies:: fault_sweep:: state_machine:: router::lies::
	SIMULATED_THIN=1 SLACKWATER_SWEEP=full PROPTEST_CASES=20000 $(CARGO) test --locked --no-fail-fast --features fault --test simulated
	$(TESTS_AS_ROOT) SLACKWATER_SOAK=1 $(CARGO) test --locked --no-fail-fast --features fault --test guest
	@if [ -n "$$($(AS_ROOT) tests/cluster/node list 2>/dev/null)" ]; then $(AS_ROOT) env E2E_KILLS=20 tests/e2e/run populate restores; \
	else echo "kills of data sources, schedules, reverts and restores in a cluster: none runs on this machine (make cluster)"; fi

.PHONY: fuzz
fuzz: ## Fuzz the parsers of records, tables, superblocks, program output and requests, FUZZ_SECONDS=120 for each target
	FUZZ_SECONDS=$${FUZZ_SECONDS:-120} $(CARGO) test --locked --workspace --lib fuzz -- --nocapture 2>&1 | grep -E ' inputs in |Test failed|planted bug was not found|test result'

# The kinds of pools that use nothing of this kernel, and the others.
sanity-elsewhere: KINDS := memory memory-thin router lvm
sanity-here: KINDS := xfs btrfs ext4
.PHONY: sanity sanity-elsewhere sanity-here
sanity: ## Run two releases of csi-sanity against the real binary on every kind of pool
sanity: sanity-programs
sanity sanity-elsewhere sanity-here:
	@mkdir -p $(LOGS)
	$(AS_ROOT) env SLACKWATER=$(SANITY)/slackwater csi-sanity/run.sh $(KINDS) 2>&1 | tee $(LOGS)/$@.log

# The programs without fault injection. The tests look for those with it in the place where cargo puts both.
SANITY := $(TARGET)/csi-sanity/programs
.PHONY: sanity-programs
sanity-programs:
	$(CARGO) build --locked
	@mkdir -p $(SANITY) && cp $(TARGET)/debug/slackwater $(TARGET)/debug/slackwater-guard $(SANITY)/

.PHONY: bench
bench: ## Measure the driver, and the same system calls without it (docs/performance.md)
	@deploy/deps bench
	$(TESTS_AS_ROOT) $(CARGO) bench --locked --bench calls --bench clones --bench cuts --bench rest --bench thin --bench streams --bench imports --bench io --bench router
	$(CARGO) bench --locked --package slackwater-populate --bench beside

.PHONY: image
image: ## Build the driver's image as an archive, target/slackwater-image.tar (root; needs no Docker)
	$(CARGO) build --release --locked
	@$(AS_ROOT) deploy/image/build

.PHONY: image-populate
image-populate: ## Build the image of slackwater-populate as an archive, target/slackwater-populate-image.tar (root; needs no Docker)
	$(CARGO) build --release --locked --package slackwater-populate
	@$(AS_ROOT) deploy/image/build --populate

.PHONY: release
release: ## Build a release from a clean checkout, in target/release-VERSION (RELEASE.md; ARCH=arm64 cross-compiles; root for the image)
	@deploy/release/build

NODES := 2
.PHONY: cluster
cluster: image ## Start a Kubernetes of NODES=2 nodes on this machine and install the driver (root; the first build takes half an hour)
	@$(MAKE) cluster-of-image

.PHONY: cluster-of-image
cluster-of-image: # with the image as it is
	@$(AS_ROOT) tests/cluster/up --nodes $(NODES) >/dev/null
	@$(AS_ROOT) tests/cluster/install
	@$(AS_ROOT) tests/cluster/up --say

.PHONY: cluster-down
cluster-down: ## Stop that Kubernetes and delete it, except for the build cache
	@$(AS_ROOT) tests/cluster/down

.PHONY: e2e
e2e: ## Run end-to-end tests in the cluster of `make cluster` (SUITES="lifecycle groups")
	$(CARGO) build --release --locked --package kubectl-slackwater
	@$(AS_ROOT) tests/e2e/run $(SUITES)

.PHONY: bench-e2e
bench-e2e: ## Measure claims, snapshots, restores and growth in that cluster (BENCH_BESIDE=another driver's StorageClass)
	@$(AS_ROOT) tests/e2e/bench

# With the programs of csi-sanity, which are built anyway: a release build takes longer than these suites.
e2e-if-warm: export IMAGE_PROGRAM := $(abspath $(SANITY))/slackwater
e2e-if-warm: export IMAGE_OUT := $(abspath $(SANITY))/image.tar
.PHONY: e2e-if-warm
e2e-if-warm: sanity-programs # part of `make test`: suites on one node, if the cluster (and for databases, their images) is already built, and it is not later than E2E_UNTIL (seconds since 1970)
	@mkdir -p $(LOGS); \
	if ! tests/cluster/build --is-warm; then \
		echo "end-to-end tests: no cluster is built on this machine (make cluster builds it, half an hour)" | tee -a $(LOGS)/left-out.log; \
	elif [ -n "$$(tests/cluster/node list)" ]; then \
		echo "end-to-end tests: a cluster runs on this machine already (make e2e)" | tee -a $(LOGS)/left-out.log; \
	elif [ -n "$${E2E_UNTIL:-}" ] && [ "$$(date +%s)" -gt "$$E2E_UNTIL" ]; then \
		echo "end-to-end tests: the time for all tests was nearly over (make cluster, make e2e)" | tee -a $(LOGS)/left-out.log; \
	else \
		code=0; suites="lifecycle groups"; \
		if tests/cluster/databases --is-warm; then suites+=" databases"; \
		else echo "databases in pods: their images aren't made on this machine (make e2e makes them)" | tee -a $(LOGS)/left-out.log; fi; \
		$(AS_ROOT) deploy/image/build && $(MAKE) cluster-of-image NODES=1 && $(AS_ROOT) tests/e2e/run $$suites || code=$$?; \
		$(MAKE) cluster-down; exit $$code; \
	fi 2>&1 | tee $(LOGS)/$@.log

.PHONY: fmt
fmt: ## Format the sources
	$(CARGO) fmt

.PHONY: clean
clean: ## Delete build results
	$(CARGO) clean
