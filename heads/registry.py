# SPDX-License-Identifier: Apache-2.0
"""The kinds of heads, a record each: everything that lists kinds asks these records. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ppd.heads.base import HeadsConfig
    from vllm_ppd.heads.calibration.run import Part
    from vllm_ppd.heads.calibration.setting import Setting
    from vllm_ppd.heads.training.options import TrainingOptions
    from vllm_ppd.heads.training.recipe import Recipe


@dataclass(frozen=True)
class HeadsSpec:
    """One kind of heads, a folder of this package; nothing of it loads before it is asked for.

    Its classes are <prefix>Config, <prefix>Options and <prefix>Recipe.
    """

    kind: str  # as speculators' algorithm name in config.json
    prefix: str
    method: str  # the drafting method that reads them, by the plugin's name for it

    def _named(self, module: str, name: str) -> Any:
        return resolve_name(f"vllm_ppd.heads.{self.kind}.{module}:{name}")

    @property
    def config(self) -> type[HeadsConfig]:
        """The class of `config.json`."""
        return self._named("config", f"{self.prefix}Config")

    @property
    def options(self) -> type[TrainingOptions]:
        """The options of `ppd train KIND`."""
        return self._named("options", f"{self.prefix}Options")

    @property
    def recipe(self) -> type[Recipe]:
        """How they are trained."""
        return self._named("recipe", f"{self.prefix}Recipe")

    @property
    def parts(self) -> dict[str, Part]:
        """What `ppd calibrate` measures of them, by name."""
        return self._named("calibration", "PARTS")

    @property
    def tables(self) -> Callable[[dict[str, Any], dict[str, Any]], Iterator[str]]:
        """Markdown of what was measured: (parts, the calibration's options) to blocks."""
        return self._named("calibration", "tables")

    @property
    def settings(self) -> Callable[[Any, dict[str, Any], bool], Iterator[Setting]]:
        """Every setting that was calibrated with what it costs: (config, parts, of greedy texts or sampled ones)."""
        return self._named("cost", "settings")


HEADS: dict[str, HeadsSpec] = {
    spec.kind: spec
    for spec in (
        HeadsSpec("early", "Early", method="ppd"),
        HeadsSpec("cp", "CP", method="cp"),
        HeadsSpec("dynamo", "DynaMo", method="dynamo"),
    )
}
