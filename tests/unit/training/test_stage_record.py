"""What a stage records is read back; damaged records are left out."""

from disaggkd_cli.training.stage_record import StageRecord, read_stage_records, write_stage_record


def test_records_come_back_by_rank(tmp_path):
    records = [StageRecord(f"teacher 0.{stage}", 4 * stage, 4 * stage + 3, 10 + stage, 0.25, 4) for stage in range(2)]
    for record in reversed(records):
        write_stage_record(tmp_path, record)
    (tmp_path / "teacher_0.7.stage.json").write_text("{")
    assert read_stage_records(tmp_path) == records
    write_stage_record(tmp_path, records[0])
    assert len(list(tmp_path.iterdir())) == 3
    assert read_stage_records(tmp_path / "nowhere") == []
