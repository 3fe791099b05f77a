# SPDX-License-Identifier: Apache-2.0
"""Resolution of a speculative model's name: one of our methods, heads (a folder or on
the Hub), or vLLM's own.
"""

import difflib
import logging
import os
import re
from pathlib import Path
from typing import Any

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.files import read_json_object
from vllm_ppd.heads.folder import CONFIG_NAME, check_folder, kind_of, tensor_names
from vllm_ppd.heads.hub import folder_of, hub_name, pinned
from vllm_ppd.heads.kinds import KINDS, kind_in
from vllm_ppd.heads.target import check_reachable, find_target
from vllm_ppd.heads.text import quoted
from vllm_ppd.vllm_plugins import platform
from vllm_ppd.vllm_plugins.config.options import AUTO, NONE, OptionError
from vllm_ppd.vllm_plugins.registry import ALIASES, PPD, PPD_OPTIONS, names

logger = logging.getLogger("vllm.vllm_ppd")

ARCHITECTURES = {config.architecture for config in KINDS.values()}
TENSORS = re.compile("|".join(config.tensor_names for config in KINDS.values()))
# keywords, files, classes of users
VLLMS = re.compile(r"ngram|\[ngram\]|.*://.*|.*\.gguf|[^\W\d]\w*(\.[^\W\d]\w*)+")


def is_ours(speculative_config: dict[str, Any]) -> bool:
    """Whether a speculative_config asks for one of our methods.

    Raises:
        OptionError, HeadsError: if its method or model is unusable; vLLM would look
            such a name up on the Hub and fail with a page of errors.
    """
    method = speculative_config.get("method")
    model = speculative_config.get("model")
    if not isinstance(method, str | None) or not isinstance(model, str | None):
        return True  # our options refuse it
    if method is None:
        return model is not None and (model in names() or _names_heads(model))
    if method not in platform.speculative_methods().union(names()):
        near = difflib.get_close_matches(method.lower(), names(), n=1)
        if near:
            raise OptionError(
                f"speculative_config: unknown method {quoted(method)}; did you mean "
                f"{near[0]!r}?"
            )
    return method in names()


def with_method(
    speculative_config: dict[str, Any], stages: int
) -> dict[str, Any]:
    """A speculative_config with its names resolved to one of our methods, or PPD where
    heads are still to be found, and its heads.

    A method may be given as the model, and heads without a method. Hub names are pinned
    to a commit, so that every process has the same.

    Raises:
        OptionError: if two heads are given.
        HeadsError: if the heads cannot be fetched from the Hub.
    """
    given = dict(speculative_config)
    model = given.get("model")
    if "method" not in given and isinstance(model, str) and model in names():
        given["method"] = given.pop("model")
    heads = given.get("heads")
    if heads is not None and "model" in given:
        raise OptionError(
            f"heads={quoted(heads)} and model={quoted(model)} are both set; set only "
            "one of them"
        )
    method = given.setdefault("method", PPD)
    if method == PPD and isinstance(heads, str) and heads not in (AUTO, NONE):
        given["model"] = given.pop("heads")
    if isinstance(given.get("model"), str):
        given["model"] = pinned(os.path.expanduser(given["model"]))
    if method in ALIASES:
        given["method"] = fitting(given, stages) if method == PPD else "early"
    if given["method"] != method:
        return {name: given[name] for name in given if name not in PPD_OPTIONS}
    return given


def fitting(given: dict[str, Any], stages: int) -> str:
    """The method that PPD stands for: that of the heads, of the options or of the
    pipeline stages.

    Where none of these decides it is PPD itself: an exit that was neither trained nor
    calibrated often costs more than it gains.
    """
    method = PPD
    if isinstance(given.get("model"), str):
        method = kind_of(given["model"]) or "early"
    elif not given.keys().isdisjoint(("exit_layer", "gamma")):
        method = "early"
    is_group = stages > 1 or "candidates" in given
    return "group" if is_group and method in (PPD, "early") else method


def _names_heads(model: str) -> bool:
    """Whether a speculative model without a method is one of our heads folders.

    Raises:
        OptionError, HeadsError: if vLLM could not load it either.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        files = os.listdir(path)
        if CONFIG_NAME not in files and "params.json" not in files:
            raise OptionError(
                f"speculative model folder {quoted(model)} has no {CONFIG_NAME}; set "
                "a heads folder"
            )
        return is_heads_folder(path)
    if os.path.exists(path) and not model.endswith(".gguf"):
        wrong = "is a file; pass its folder"
    elif model.startswith(("./", "../", "/", "~")):
        wrong = "does not exist"
    elif VLLMS.fullmatch(model):
        return False
    elif hub_name(model) is not None:
        return _is_on_hub(model)
    else:
        wrong = (
            "is neither a method nor a folder" if model.strip() else "is empty"
        )
    raise OptionError(
        f"speculative model {quoted(model)} {wrong}; set a method "
        f"({', '.join(names())}), a heads folder, or ORGANIZATION/NAME on the "
        "Hub (for a draft model, also vLLM's method)"
    )


def _is_on_hub(model: str, serving: bool = False) -> bool:
    """Whether a name on the Hub is a heads repository; only names of heads may have a
    revision.

    If `serving`, vLLM asks the Hub for the name next, and reports what is wrong with
    it.

    Raises:
        OptionError: if another repository is named with a revision.
        HeadsError: if the Hub cannot be read.
    """
    name = hub_name(model)
    if name is None or platform.variable("VLLM_USE_MODELSCOPE"):
        return False
    try:
        ours = is_heads_folder(folder_of(model, CONFIG_NAME))
    except HeadsError as error:
        if name.revision is None and (serving or isinstance(error, MissingFile)):
            return False
        raise
    if not ours and name.revision is not None:
        raise OptionError(
            f"speculative model {quoted(model)} has no heads; set a draft model's "
            "revision as revision in --speculative-config"
        )
    return ours


def is_heads_folder(folder: str) -> bool:
    """Whether a local folder holds our heads, by its configuration or the names of its
    tensors.

    Raises:
        HeadsError: if its configuration is unusable.
    """
    try:
        data = read_json_object(Path(folder) / CONFIG_NAME, "write it again")
    except MissingFile:
        if _has_our_tensors(folder):
            raise
        return False
    named = data.get("architectures")
    architectures = named if isinstance(named, list) else []
    if kind_in(data) is not None or any(
        name in architectures for name in ARCHITECTURES
    ):
        return True
    kind = data.get("speculators_model_type")
    if kind is None and data.get("speculators_config") is None:
        return _has_our_tensors(folder)
    return str(kind) not in platform.speculators_algorithms() - set(KINDS)


def _has_our_tensors(folder: str) -> bool:
    return any(TENSORS.match(name) for name in tensor_names(folder))


def served_heads(
    model: str, given: dict[str, Any] | None, revision: str | None = None
) -> tuple[str, dict[str, Any]] | None:
    """The target and the speculative_config of `vllm serve HEADS`; None if the folder
    holds no heads.

    Args:
        model: the argument of `vllm serve`.
        given: the user's own speculative_config.
        revision: the value of --revision.

    Raises:
        OptionError, HeadsError: if the heads are damaged, if their target is not found,
            or if another method is given.
    """
    if _is_on_hub(model, serving=True):
        if revision is not None:
            raise OptionError(
                f"{quoted(model)} are heads, but --revision is the target's; name "
                "them as ORGANIZATION/NAME@REVISION and serve TARGET with "
                "--speculative-model"
            )
        model = pinned(model)
    elif not os.path.isdir(model) or not is_heads_folder(model):
        return None
    config = check_folder(model)
    asked = {key.replace("-", "_"): value for key, value in (given or {}).items()}
    method = asked.get("method", PPD)
    if method not in names():
        raise OptionError(
            f"speculative_config: method={quoted(method)} does not support "
            f"{config.kind} heads, which {quoted(model)} holds; remove it"
        )
    if asked.get("model") not in (None, model):
        raise OptionError(
            f"{quoted(model)} are heads, but speculative_config has another model; "
            "serve the target, or remove one"
        )
    another = "vllm serve TARGET --speculative-model HEADS"
    target = find_target(config.verifier, folder_of(model, CONFIG_NAME))
    check_reachable(target, model, f"name it: {another}")
    logger.info(
        "vllm-ppd: serving %s, the target of the heads in %s; for another: %s",
        target,
        model,
        another,
    )
    return target, {**asked, "method": method, "model": model}
