"""What holds for every test: whatever report it leaves behind is one by the published schema."""

from __future__ import annotations

import json

import pytest

from pytest_sglmem import report


@pytest.fixture(autouse=True)
def every_report_left_behind_is_valid(request):
    """Validate each `.json` report in the test's own folders against `report.schema.json`, once the test is over."""
    folders = []
    if "tmp_path" in request.fixturenames:
        folders.append(request.getfixturevalue("tmp_path"))
    if "pytester" in request.fixturenames:
        folders.append(request.getfixturevalue("pytester").path)
    yield
    paths = [path for folder in folders for path in folder.rglob("*.json")]
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(document, dict) and document.get("schema") == report.SCHEMA:
            jsonschema = pytest.importorskip("jsonschema")
            jsonschema.Draft202012Validator(report.json_schema()).validate(document)
