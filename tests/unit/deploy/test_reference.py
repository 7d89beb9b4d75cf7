"""The documents' tables are those of the settings classes and of the metrics' registries."""

from pathlib import Path

from deploy.monitoring.catalog import PROCESSES, families
from deploy.reference import DOCUMENTS, SETTINGS, metrics_table, settings_table, with_tables

ROOT = Path(__file__).parents[3]


def test_every_setting_has_a_row():
    for cls in SETTINGS.values():
        table = settings_table(cls)
        for name in cls.model_fields:
            assert f"`--{name.replace('_', '-')}`" in table


def test_the_documents_are_up_to_date():
    """On failure: python -m deploy.reference"""
    text = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    for name in SETTINGS:
        assert f"<!-- settings: {name} -->" in text
    for name in PROCESSES:
        assert f"<!-- metrics: {name} -->" in text
    assert with_tables(text) == text


def test_every_metric_has_a_row_with_a_unit():
    for process in PROCESSES:
        rows = metrics_table(process).splitlines()[2:]
        assert len(rows) == len(families(process)) > 20
        for each, row in zip(families(process), rows, strict=True):
            assert row.startswith(f"| `{each.name}` | {each.kind} |")
            assert each.unit, f"{each.name} has no unit"
