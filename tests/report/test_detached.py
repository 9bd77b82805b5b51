"""Parameters of any kind are shown alike before and after a report is detached."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pediag.report.json import render

VALUES = {
    "tensor": torch.tensor([0.5, 1.25, float("nan")], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "long": torch.arange(5000),
    "wide": np.linspace(0, 1, 9000).reshape(90, 100),
    "rows": np.arange(12, dtype=np.int32).reshape(3, 4),
    "numpy float": np.float32(0.1),
    "numpy double": np.float64(0.1),
    "infinite": float("inf"),
    "nested": {"a": (1, {"deep": torch.ones(2)}), 7: {3, 1, 2}, True: None},
    "odd": Path("some/file"),
    "dtype": torch.float16,
    "text": "plain",
    "flag": False,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_is_shown_as_before(make_report, name):
    report = make_report(outcomes=[])
    first = vars(report.encodings[0])
    report.encodings = [SimpleNamespace(**{**first, "parameters": {name: VALUES[name]}})]
    detached = pickle.loads(pickle.dumps(report.detached()))
    assert render(detached) == render(report)
    assert inspected(detached) == inspected(report)


def inspected(report) -> str:
    from io import StringIO

    from rich.console import Console

    from pediag.report.rich import render_inspection

    stream = StringIO()
    render_inspection(report, Console(file=stream, width=160, color_system=None))
    return stream.getvalue()


def test_an_array_is_not_kept_alive_by_its_part(make_report):
    report = make_report()
    whole = np.zeros((1000, 1000))
    report.encodings = [SimpleNamespace(**{**vars(report.encodings[0]), "parameters": {"row": whole[0]}})]
    (encoding,) = report.detached().encodings
    assert encoding.parameters["row"].base is None
    assert encoding.parameters["row"].nbytes == 8000
