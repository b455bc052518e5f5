"""Where the panels of a grid lie: columns, places, and which node is under a cell. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from textual.geometry import Region

MIN_PANEL_WIDTH = 38
MAX_PANEL_WIDTH = 64


@dataclass(frozen=True)
class Grid:
    """``count`` cells of ``cell_height`` lines in ``columns`` columns over ``width`` cells."""

    count: int
    width: int
    columns: int
    cell_height: int

    @property
    def rows(self) -> int:
        return -(-self.count // self.columns)

    @property
    def height(self) -> int:
        return self.rows * self.cell_height

    def column_start(self, column: int) -> int:
        """Columns share the width evenly, up to `MAX_PANEL_WIDTH` each."""
        return (
            column * min(self.width, self.columns * MAX_PANEL_WIDTH) // self.columns
            if self.columns > 1
            else column * self.width
        )

    def column_width(self, column: int) -> int:
        return self.column_start(column + 1) - self.column_start(column)

    def region(self, index: int) -> Region:
        row, column = divmod(index, self.columns)
        start = self.column_start(column)
        return Region(start, row * self.cell_height, self.column_width(column), self.cell_height)

    def at(self, x: int, y: int) -> int | None:
        """Return the index of what is drawn at that place of the whole view, or None."""
        for column in range(self.columns):
            if self.column_start(column) <= x < self.column_start(column + 1):
                index = y // self.cell_height * self.columns + column
                return index if y >= 0 and index < self.count else None
        return None

    def span(self, top: int, height: int) -> range:
        """Return the indices of what the lines ``top .. top + height`` show."""
        first = max(0, top // self.cell_height) * self.columns
        last = -(-(top + height) // self.cell_height) * self.columns
        return range(first, min(self.count, last))

    def step(self, way: str, index: int, view_height: int) -> int:
        """Return how many places ``way`` leads from ``index``; up and down keep the column."""
        page = max(1, view_height // self.cell_height) * self.columns
        rows_below = self.rows - 1 - index // self.columns
        steps = {
            "up": -self.columns if index >= self.columns else 0,
            "down": min(self.columns, self.count - 1 - index) if rows_below else 0,
            "left": -1,
            "right": 1,
            "page_up": -min(page, index // self.columns * self.columns),
            "page_down": min(page, rows_below * self.columns),
            "home": -index,
            "end": self.count - 1 - index,
        }
        return steps[way]


def panel_grid(count: int, width: int, panel_height: int) -> Grid:
    columns = max(1, min(width // MIN_PANEL_WIDTH, max(1, count)))
    return Grid(count, width, columns, panel_height)


def row_list(count: int, width: int) -> Grid:
    return Grid(count, width, 1, 1)
