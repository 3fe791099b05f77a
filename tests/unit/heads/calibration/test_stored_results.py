# SPDX-License-Identifier: Apache-2.0
"""`calibration.json` and `provenance.json` of another shape: one line, and nothing else goes wrong."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Factory
from refusals import put

from vllm_ppd.heads.base import LARGEST_BATCH
from vllm_ppd.heads.calibration.report import report
from vllm_ppd.heads.calibration.run import unfinished
from vllm_ppd.heads.errors import HeadsError
from vllm_ppd.heads.files import digest_of_value
from vllm_ppd.heads.in_words import drafts_in_words, in_words, setting_in_words
from vllm_ppd.heads.io import load_calibration
from vllm_ppd.vllm_plugins.cli.main import main


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("cp", "[]", "calibration.json .* holds .*, not an object; run `ppd calibrate"),
        ("cp", '{"finished": true}', "parts.*; run `ppd calibrate"),
        ("cp", '{"finished": "yes"}', "no finished calibration"),
        ("cp", "{", "is not valid JSON"),
        ("early", ("matches", "layers", [2]), "a rate for each of its layers"),
        ("early", ("matches", "match", "1", "Y", [0.1, None]), "match.1.Y.1: Input should be a valid number"),
        ("early", ("timing", "seconds", "layer", {}), "seconds.layer: Dictionary should have at least 1 item"),
        ("early", ("timing", "lm_head_share", float("nan")), "lm_head_share: Input should be a finite number"),
        ("early", ("matches", "acceptance", {"greedy": {}}), "must have greedy and sampled texts"),
        ("early", ("matches", "acceptance", "greedy", "Y", "9", []), "names exit layer 9, which does not exist"),
        ("cp", ("acceptance", "T 0.8", "by_drafts", 0, "length", "1"), "length: Input should be a valid number"),
        ("dynamo", ("acceptance", "T 0.8", "rows", 0, "eps_b", None), "eps_b: Input should be a valid number"),
    ],
)  # fmt: skip
def test_calibration_of_another_shape(
    whole_heads: Factory, tmp_path: Path, kind: str, content: Any, message: str, capsys: Any
) -> None:
    folder = Path(shutil.copytree(whole_heads(kind), tmp_path / "heads"))
    path = folder / "calibration.json"
    if isinstance(content, tuple):
        *places, value = content
        data = json.loads(path.read_text())
        put(data["parts"], places, value)
        content = json.dumps(data)
    path.write_text(content)
    capsys.readouterr()
    assert main(["plan", str(folder)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line) and len(line) <= len("ppd: error: ") + 300, line
    with pytest.raises(HeadsError, match=message):
        load_calibration(folder)
    assert main(["inspect", str(folder)]) == 0  # the server takes them
    assert re.search(rf"^calibrated +.*({message})", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("kind", ["demo/heads/early", "demo/heads/cp", "demo/heads/dynamo", "smollm/heads/cp"])
def test_what_is_printed_of_heads_is_for_people(kind: str, capsys: Any) -> None:
    """No Python or JSON literals, and no number that stands for no limit; so in the model cards."""
    folder = DEMO.parents[1] / kind
    assert main(["inspect", str(folder)]) == 0
    result = json.loads((folder / "calibration.json").read_text())
    shown = capsys.readouterr().out + report(result)
    assert not re.search(r"[{}\[\]]|\b(null|None|true|True|2147483647)\b", shown)
    card = (folder / "README.md").read_text().split("## Training")[1]
    assert not re.search(r"[{}\[\]]|2147483647", card) and report(result).splitlines()[-1] in card


def test_values_in_words() -> None:
    ranges = [[1, 1, 0], [2, 2, 3], [3, 8, 1], [9, LARGEST_BATCH, 0]]
    expected = "none at 1 request, 3 at 2 requests, 1 at 3 to 8 requests, none at 9 or more requests"
    assert drafts_in_words(ranges) == expected
    assert drafts_in_words([[1, LARGEST_BATCH, 2]]) == "2 at any number of requests"
    calibration = {"device": "cpu", "num_speculative_tokens_per_batch_size": ranges}
    assert setting_in_words("calibration", calibration) == f"drafts on cpu: {expected}"
    assert setting_in_words("draft_vocab_size", None) == "the whole vocabulary"
    assert in_words({"a": [1, 0.25], "b": True, "c": None, "d": []}) == "a: 1, 0.25, b: yes, c: none, d: none"


def test_a_damaged_calibration_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    fresh: dict[str, Any] = {"options": {"seed": 1}, "heads_stamp": 1, "parts": {}, "digests": {}}
    part = {"length": 1.5}
    stored = fresh | {"parts": {"acceptance": part}, "digests": {"acceptance": digest_of_value(part)}}
    path.write_text(json.dumps(stored))
    assert unfinished(path, fresh) == stored
    path.write_text(json.dumps(stored | {"parts": {"acceptance": {"length": 2.5}}}))  # edited by hand
    assert unfinished(path, fresh) == fresh
    for other in ({"heads_stamp": 2}, {"options": {"seed": 2}}, {"finished": True}):
        path.write_text(json.dumps(stored | other))
        assert unfinished(path, fresh) == fresh
    for odd in ("[]", "{", '{"options": {}, "heads_stamp": 1, "parts": []}', '{"options": []}'):
        path.write_text(odd)
        assert unfinished(path, fresh) == fresh


@pytest.mark.parametrize("content", ["[]", "{}", "null", "{", '{"time": [], "command": 3}'])
def test_provenance_of_another_shape(whole_heads: Factory, tmp_path: Path, content: str, capsys: Any) -> None:
    """It says nothing that keeps heads from loading: it is named, and the rest is told."""
    folder = Path(shutil.copytree(whole_heads("cp"), tmp_path / "heads"))
    (folder / "provenance.json").write_text(content)
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^trained +provenance.json in .*; train the heads again, or delete it$", out, re.M), out
    assert "will load: yes" in out
