"""The README's tables are those of the settings classes."""

from pathlib import Path

from deploy.reference import SETTINGS, settings_table, with_tables

README = Path(__file__).parents[3] / "README.md"


def test_every_setting_has_a_row():
    for cls in SETTINGS.values():
        table = settings_table(cls)
        for name in cls.model_fields:
            assert f"`--{name.replace('_', '-')}`" in table


def test_the_readme_is_up_to_date():
    """On failure: python -m deploy.reference"""
    text = README.read_text()
    for name in SETTINGS:
        assert f"<!-- settings: {name} -->" in text
    assert with_tables(text) == text
