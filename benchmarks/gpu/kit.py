# SPDX-License-Identifier: Apache-2.0
"""A folder of wheels that brings this package and vLLM's CUDA build to a machine without a network.

python -m vllm_ppd.benchmarks.gpu.kit --out kit --python 3.12
python -m pip install --no-index --find-links kit 'vllm-ppd[dev]'     # on that machine
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VLLM = "0.33.0"
# pip compares the N of manylinux_2_N exactly, so that each must be named.
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 38, 39)


def commands(out: Path, python: str, vllm: str) -> list[list[str]]:
    """What fills the folder: this package's wheel, then vLLM's and those of all that both require."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    target = [word for name in platforms for word in ("--platform", name)]
    target += ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    download = [*pip, "download", "--dest", str(out), "--find-links", str(out), *target]
    return [
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(out), str(ROOT)],
        [*download, f"vllm=={vllm}", "vllm-ppd[dev]"],
    ]


def left_out(names: list[str], without: list[str]) -> list[str]:
    """Wheels whose project matches a pattern: the machine has them already."""
    return [name for name in names if any(fnmatch.fnmatch(name.split("-")[0].replace("_", "-"), p) for p in without)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the wheels; those that it has are kept")
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="of that machine")
    parser.add_argument("--vllm", default=VLLM, help="version of vLLM (default: %(default)s)")
    parser.add_argument("--without", default="", help="projects that the machine has, as torch,triton,nvidia-*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for command in commands(args.out, args.python, args.vllm):
        subprocess.run(command, check=True)
    names = [path.name for path in args.out.glob("*.whl")]
    for name in left_out(names, [pattern for pattern in args.without.split(",") if pattern]):
        (args.out / name).unlink()
    kept = list(args.out.glob("*.whl"))
    print(f"{args.out}: {len(kept)} wheels, {sum(path.stat().st_size for path in kept) >> 20} MiB")


if __name__ == "__main__":
    main()
