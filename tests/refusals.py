# SPDX-License-Identifier: Apache-2.0
"""Everyone who reads a heads folder, up to where a model would load, and damages of a folder."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm import EngineArgs
from vllm.engine import arg_utils

from vllm_ppd.heads.calibration.run import checked
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.options import CalibrationOptions
from vllm_ppd.vllm_plugins import register
from vllm_ppd.vllm_plugins.cli.main import main
from vllm_ppd.vllm_plugins.config.activation import activate
from vllm_ppd.vllm_plugins.config.options import OptionError

register()
Damage = Callable[[Path], Any]
SERVE = "vllm serve HEADS"


class Refused(Exception):
    """A command of ours ended with exit code 2."""


class Readers:
    """What reads a heads folder, by a name for it; each takes the name of a folder."""

    def __init__(self, model: Path) -> None:
        self.model = str(model)
        self.model_config = EngineArgs(
            model=self.model, dtype="float32"
        ).create_model_config()
        self.of: dict[str, Callable[[str], Any]] = {
            "model alone": lambda folder: self.server(
                speculative_config={"model": folder}
            ),
            "--speculative-model": lambda folder: self.server(spec_model=folder),
            SERVE: self.serve,
            "inspect": lambda folder: command("inspect", folder),
            "calibrate": lambda folder: checked(
                CalibrationOptions(heads=folder, data=("-",))
            ),
        }

    def server(self, **asked: Any) -> Any:
        """What EngineArgs.create_speculative_config does first."""
        args = EngineArgs(model=self.model, dtype="float32", **asked)
        return activate(args, self.model_config, arg_utils.ParallelConfig())

    def serve(self, folder: str) -> Any:
        """What EngineArgs.create_engine_config does first."""
        target, _, asked = arg_utils.maybe_override_with_speculators(
            model=folder,
            tokenizer=None,
            trust_remote_code=False,
            vllm_speculative_config=None,
        )
        assert target == self.model
        return self.server(speculative_config=asked)

    def refusal(self, reader: str, folder: str) -> str | None:
        """The one line with which a folder is refused; None if it is taken."""
        try:
            self.of[reader](folder)
        except (HeadsError, OptionError, Refused) as error:
            line = str(error)
            assert "\n" not in line, line
            assert len(line) <= 300, line
            return line
        return None

    def assert_taken(self, folder: Any, *names: str) -> None:
        """By the readers of these names, or by all."""
        for name in names or self.of:
            assert self.refusal(name, str(folder)) is None, name

    def assert_refused(self, message: str, folder: Any, *names: str) -> None:
        """With a line that matches, by the readers of these names, or by all."""
        for name in names or self.of:
            line = self.refusal(name, str(folder))
            assert re.search(message, str(line)), f"{name}: {line}"


def command(*argv: str) -> None:
    """Run `ppd`.

    Raises:
        Refused: with its one line, if it ends with exit code 2.
    """
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = main(argv)
    if code:
        assert code == 2
        raise Refused(
            said.getvalue().removeprefix("ppd: error: ").removesuffix("\n")
        )


def edited(*path: Any, value: Any) -> Damage:
    """Set a value in config.json (an Ellipsis deletes it)."""
    *parents, last = path

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        data = json.loads(file.read_text())
        owner = data
        for key in parents:
            owner = owner[key]
        if value is ...:
            del owner[last]
        else:
            owner[last] = value
        file.write_text(json.dumps(data))

    return damage


def config_text(content: bytes) -> Damage:
    """Write config.json anew."""
    return lambda folder: (folder / "config.json").write_bytes(content)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change one of the tensors."""

    def damage(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        tensors = {key: value.clone() for key, value in stored.items()}
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors")

    return damage


def with_value(
    value: float, place: int = 5
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Set one number of a tensor."""

    def change(values: torch.Tensor) -> torch.Tensor:
        values.view(-1)[place] = value
        return values

    return change
