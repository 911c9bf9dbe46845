"""Tables for people."""

import pytest

from cauc_ray.api.tables import Cell, Grid


def test_a_table_is_markdown_and_marks_cells():
    grid = Grid("a | b", ("model", "x_y"), ((Cell("m|0"), Cell("1", "bold")), (Cell("m_1"), Cell("2", "underline"))))
    lines = grid.markdown().splitlines()
    assert lines[0] == r"**a \| b**"
    assert lines[2:] == [r"| model | x\_y |", "| :-- | --: |", r"| m\|0 | **1** |", r"| m\_1 | <ins>2</ins> |"]
    assert grid.rich().row_count == 2


@pytest.mark.parametrize(
    ("form", "values", "shown"),
    [
        ("number", [1234.5], "1234"),
        ("times", [None], "–"),
        ("points", [0.5], "50.00"),
        ("signed", [0.5], "+50.00"),
        ("interval", [0.25, 0.5], "25.00 – 50.00"),
        ("gain", [0.0, -0.5, 0.5], "+0.00 (-50.00 – +50.00)"),
    ],
)
def test_columns_show_values_of_rows(form, values, shown):
    row = dict(enumerate(values))
    grid = Grid.of("a", [row, row], [("b", form, *row)], {(1, 0): "bold"})
    assert grid.rows == ((Cell(shown),), (Cell(shown, "bold"),))
