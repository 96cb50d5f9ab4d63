#!/usr/bin/env bash
# On a GPU machine, without network, in a few minutes: the GPU tests, the sampler's benchmark, the
# training benchmark and the profile, with their tables, CSV files and figures in one folder.
#
#     tools/gpu_report.sh OUTPUT [--bundle FOLDER] [--device cuda|cpu]
#
# --bundle installs what tools/offline_bundle.sh has collected, into a virtual environment that
# sees this machine's PyTorch. --device cpu runs the same at small sizes, to try the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    echo "usage: $0 OUTPUT [--bundle FOLDER] [--device cuda|cpu]" >&2
    exit 2
}
[[ $# -ge 1 && $1 != -* ]] || usage
output=$1
shift
bundle='' device=cuda
while [[ $# -gt 0 ]]; do
    [[ $# -ge 2 ]] || usage
    case $1 in
        --bundle) bundle=$2 ;;
        --device) device=$2 ;;
        *) usage ;;
    esac
    shift 2
done
[[ $device == cuda || $device == cpu ]] || usage
[[ -z $bundle || -d $bundle/wheels ]] || { echo "$0: --bundle $bundle has no wheels" >&2; exit 2; }
mkdir -p "$output"
output=$(cd "$output" && pwd)
python=${PYTHON:-python3}

if [[ -n $bundle ]]; then
    echo "gpu_report: installing from $bundle"
    packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    "$python" -m venv "$output/venv"
    # --system-site-packages would pass over a PyTorch that is in a virtual environment itself.
    packages "$python" >"$(packages "$output/venv/bin/python")/machine.pth"
    python=$output/venv/bin/python
    install=("$python" -m pip --disable-pip-version-check --quiet install --no-index -f "$bundle/wheels")
    "${install[@]}" "setuptools<81" wheel
    "$python" tools/list_requirements.py | xargs -d '\n' "${install[@]}"
    "${install[@]}" --no-build-isolation --no-deps .
    "$python" tools/install_detectron2.py --archive "$bundle"/pb1*detectron2*.tar.gz
fi
if [[ $device == cuda ]]; then
    "$python" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else
        "gpu_report: this torch finds no CUDA device; --device cpu tries the script")'
    works=(rpn roi) rounds=9 images=(1 2 4 8 16) rpn_images=(2 8) size=(800 1333) steps=12
    config=configs/faster_rcnn_R_50_FPN_static.yaml
else
    works=(small) rounds=3 images=(1 2) rpn_images=(2) size=(96 128) steps=4
    config=configs/quick/faster_rcnn_R_18_FPN_shapes.yaml
fi

# Each part leaves its log; one that fails does not stop the others.
failed=0
part() {
    local name=$1 begin=$SECONDS
    shift
    echo "gpu_report: $name"
    "$@" >"$output/$name.log" 2>&1 || { echo "gpu_report: $name FAILED, see $name.log" >&2; failed=1; }
    echo "gpu_report: $name took $((SECONDS - begin)) s"
}
part versions "$python" -m torch.utils.collect_env
part tests "$python" -m pytest tests/cuda -q
part sampler "$python" tools/benchmark_sampler.py --work "${works[@]}" --select rank topk \
    --rounds "$rounds" --device "$device" --csv "$output/sampler.csv"
part train "$python" tools/benchmark_train.py --config-file "$config" --images "${images[@]}" \
    --synthetic "${size[@]}" --steps "$steps" --warmup 3 --device "$device" \
    --csv "$output/train.csv" -- MODEL.WEIGHTS '' SOLVER.BASE_LR 1e-6
part rpn "$python" tools/benchmark_rpn.py --images "${rpn_images[@]}" --size "${size[@]}" --rounds "$rounds" \
    --device "$device" --csv "$output/rpn.csv"
part profile "$python" tools/profile_step.py --images 1 4 --device "$device" --output "$output/profile"
part figures "$python" tools/plot_results.py "$output/sampler.csv" "$output/train.csv"
echo "gpu_report: $output"
exit "$failed"
