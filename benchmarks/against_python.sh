#!/usr/bin/env bash
# Measures a training step of Tessera beside those of PyTorch's FSDP2 and DDP, FairScale and DeepSpeed, and
# beside plain LibTorch with as many threads as there are ranks. Prints two Markdown tables: those of the README.
#
#   benchmarks/against_python.sh [SIZES] [LEVELS] [ROUNDS]      default: small,medium p_g_os,os_g 7
#
# All systems train the same models in the same processes; their rounds take turns. Nothing else should run
# meanwhile. FairScale and DeepSpeed come from PyPI, into a virtual environment of their own (.venv-peers), which
# sees the packages of .venv; one that can't be installed is left out, with the reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly sizes=${1:-small,medium} levels=${2:-p_g_os,os_g} rounds=${3:-7}
readonly package=build/release/python_package peers=.venv-peers

./dev build tessera_python plain_gpt train_gpt tessera_cli >&2
mkdir -p data
[[ -f data/corpus.txt ]] || .venv/bin/python scripts/make_corpus.py data/corpus.txt >&2
if [[ ! -x $peers/bin/python ]]; then
  .venv/bin/python -m venv "$peers"
  packages() { "$1"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  packages "$PWD/.venv" >"$(packages "$peers")/of_venv.pth"
fi
export PATH=$PWD/$peers/bin:$PATH DS_ACCELERATOR=cpu DS_BUILD_OPS=0
against=fsdp2,ddp
# What their builds, and DeepSpeed, need; without their own dependencies, which would bring another PyTorch.
python -m pip install -q setuptools wheel ninja hjson msgpack py-cpuinfo pydantic tqdm einops psutil packaging >&2
for peer in fairscale deepspeed; do
  python -c "import $peer" 2>/dev/null || python -m pip install -q --no-build-isolation --no-deps "$peer" >&2 || true
  if python -c "import $peer" >&2; then against+=,$peer; else echo "$peer is left out: see above" >&2; fi
done
# DeepSpeed compiles an operator at its first start: ranks that wait for it would be measured.
[[ $against != *deepspeed* ]] || python -c "from deepspeed.accelerator import get_accelerator as a
a().create_op_builder('ShareMemCommBuilder').load()" >&2

export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/$package
echo "$(date -u +%F), $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2- | xargs), $(nproc --all) cores, PyTorch" \
  "$(.venv/bin/python -c 'import torch; print(torch.__version__)'); time of a step divided by Tessera's, median [least, most]:"
echo
python -m tessera.bench --markdown --against "$against" --size "$sizes" --level "$levels" \
  --transport arena,gloo --rounds "$rounds" | grep "^|"
echo
echo "The demo's GPT on 2 ranks, beside plain LibTorch with 2 threads and the same global batch:"
echo
for model in "" "--width 512 --layers 8"; do
  echo "${model:-as it is}:"
  python3 scripts/compare_speed.py --rounds "$rounds" --steps $([[ $model ]] && echo 8 || echo 25) --threads 2 \
    --sharded "build/release/bin/tessera run -n 2 build/release/examples/train_gpt --data data/corpus.txt --sample 0 --eval-every 1000 $model" \
    --plain "build/release/examples/plain_gpt --data data/corpus.txt $model"
done
