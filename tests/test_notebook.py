"""Predictions and answers in a notebook: tables, and frames that hold the same numbers."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import pickle

import numpy as np
import pandas as pd
import pytest

import hymell_jax as hj
from hymell_jax import notebook


@pytest.fixture(scope="module")
def single(h100, llama) -> hj.Prediction:
    return hj.predict(h100, llama, hj.workload(batch_size=8))


@pytest.fixture(scope="module")
def batch(h100, llama) -> hj.Prediction:
    works = [hj.workload(batch_size=b) for b in (1, 8, 512)]
    return hj.predict_batch(h100, llama, hj.stack(works), once=True)


def test_a_prediction_is_a_row_and_a_batch_is_rows(single, batch):
    one, many = single.to_frame(), batch.to_frame()
    assert (len(one), len(many)) == (1, 3)
    assert list(one.columns) == list(many.columns)
    assert one.time_per_token_s[0] == float(single.decode.time_s)
    np.testing.assert_allclose(many.iloc[1].to_numpy(float), one.iloc[0].to_numpy(float), rtol=1e-4)
    assert many.fits.tolist() == [True, True, False]
    assert (many.time_per_token_s_low < many.time_per_token_s).all()
    half = np.log(many.time_per_token_s_high / many.time_per_token_s)
    np.testing.assert_allclose(half, np.asarray(batch.decode.log_half_widths)[:, 0], rtol=1e-4)


def test_levels_without_intervals_have_no_such_columns(single):
    def bare(phase):
        return dataclasses.replace(phase, log_half_widths=np.zeros(2, np.float32))

    plain = dataclasses.replace(single, prefill=bare(single.prefill), decode=bare(single.decode))
    assert not [name for name in plain.to_frame() if name.endswith(("_low", "_high"))]
    assert " ms to " not in _Cells(plain._repr_html_()).words
    assert " ms to " in _Cells(single._repr_html_()).words


class _Cells(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words += data + " "


def test_a_notebook_shows_a_prediction_with_its_biggest_parts(single, batch):
    shown = _Cells(single._repr_html_())
    assert f"{1e3 * float(single.decode.time_s):.2f} ms" in shown.words
    assert "ffn_up" in shown.words and "inside" in shown.words
    assert shown.tags.count("table") == 3
    rows = _Cells(batch._repr_html_())
    assert rows.tags.count("tr") == 1 + 3


@pytest.fixture(scope="module")
def design() -> dict:
    return {"variables": {"d_ff": 14336.0}, "quantities": {"loss": 1.9}, "feasible": True}


def test_answers_stay_plain_dictionaries(h100):
    answer = hj.summarise(h100, hj.preset("llama-3.1-8b"), hj.workload(batch_size=8))
    assert answer == json.loads(json.dumps(answer)) == pickle.loads(pickle.dumps(answer))
    frame = answer.to_frame()
    decode = frame[frame.phase == "decode"]
    assert decode.share.sum() == pytest.approx(1.0, abs=1e-6)
    assert list(decode.part) == list(answer["parts"]["decode"])
    assert "llama-3.1-8b on h100-sxm-80gb" in answer._repr_html_()


def test_searches_and_fronts_are_frames_of_designs(design):
    search = notebook.Answer("search", dict.fromkeys(("start", "relaxed", "concrete"), design))
    assert list(search.to_frame().design) == ["start", "relaxed", "concrete"]
    front = notebook.Answer("front", {"start": design, "front": [design] * 30})
    frame = front.to_frame()
    assert len(frame) == 31 and {"d_ff", "loss", "feasible"} <= set(frame)
    assert _Cells(front._repr_html_()).tags.count("tr") == 1 + notebook.SHOWN_ROWS
    assert "11 more rows" in front._repr_html_()


def test_a_sweep_is_the_frame_of_its_file(tmp_path):
    table = pd.DataFrame({"row": [0, 1], "loss": [1.5, 2.5]})
    table.to_parquet(tmp_path / "out.parquet")
    answer = notebook.Answer("sweep", {"rows": 2, "out": str(tmp_path / "out.parquet")})
    pd.testing.assert_frame_equal(answer.to_frame(), table)
    assert "out.parquet" in answer._repr_html_()


def test_names_cannot_break_the_table():
    text = notebook.html_table("<b>", ["<i>"], [["<script>alert(1)</script>"]])
    assert set(_Cells(text).tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
