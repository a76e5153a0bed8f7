"""The request records: the file is what the generator makes, and they are what a server keeps."""

from __future__ import annotations

from pathlib import Path

import request_records

FILE = Path(request_records.__file__).parent / "requests" / "records.jsonl"


def test_the_file_is_what_the_generator_makes(tmp_path):
    request_records.main(tmp_path / "records.jsonl")
    assert (tmp_path / "records.jsonl").read_text() == FILE.read_text()


def test_a_record_is_the_same_each_time_and_differs_by_number_and_seed():
    assert request_records.record(3) == request_records.record(3)
    assert request_records.record(3)[0] != request_records.record(4)[0]
    assert request_records.record(3)[0] != request_records.record(3, seed=1)[0]


def test_counts_agree():
    for number in range(50):
        request, output, _ = request_records.record(number)
        meta = output["meta_info"]
        assert meta["id"] == request.rid
        assert meta["prompt_tokens"] == len(request.input_ids)
        assert meta["completion_tokens"] == len(output["output_ids"])
        assert 0 <= min(request.input_ids) <= max(request.input_ids) < request_records.VOCABULARY
