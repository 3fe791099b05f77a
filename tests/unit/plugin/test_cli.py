# SPDX-License-Identifier: Apache-2.0
"""`ppd`: commands and flags from the options' models, what `inspect` prints, and how errors end."""

import re
from typing import Any

import pytest
from conftest import DEMO, Factory

from vllm_ppd.heads.kinds import KINDS
from vllm_ppd.vllm_plugins.cli.main import main


@pytest.mark.parametrize("kind", KINDS)
def test_flags_are_the_fields(kind: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["train", kind, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: ppd train {kind} --model MODEL --data FILE --out OUT [options]\n")
    for name in KINDS[kind].options.model_fields:
        assert "--" + name.replace("_", "-") in text


def test_help_shows_defaults_of_zero_and_what_lists_take(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "decode", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "0 decodes greedily (default 0.0)" in text and "random choices (default 0)" in text
    assert "(default False)" not in text and "(default ())" not in text and "(default None)" not in text
    for flag in ("--data FILE", "--heads FOLDER", "--also NAME={JSON}", "--traces NAME"):
        assert f"{flag} [" in text


def test_inspect_says_whether_heads_load(tiny_model: Factory, capsys: Any) -> None:
    folder = str(DEMO.parent / "heads" / "early")
    assert main(["inspect", folder]) == 0
    text = capsys.readouterr().out
    assert "early (EarlyHeads)" in text
    assert re.search(r"will load: yes, with \S+", text)
    for flag in ("--target", "--model"):
        assert main(["inspect", folder, flag, str(tiny_model("qwen2"))]) == 2
        assert "hidden_size is" in capsys.readouterr().err
    assert main(["inspect", folder, "--target", folder + "/.."]) == 2
    assert "the folder has no config.json; give the folder of a model" in capsys.readouterr().err
    assert main(["inspect", folder, "--target", "/nowhere"]) == 0
    out = capsys.readouterr().out
    assert "will load: not known: " in out and "'/nowhere', which is not on this disk\n" in out
    assert main(["inspect", "/nowhere"]) == 2
