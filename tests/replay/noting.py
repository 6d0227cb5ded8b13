"""An environment whose answers follow from their seeds, and which notes what it is asked."""

from pathlib import Path

from rlx.types import TaskRow


class Noting:
    """Says the number of the turn; notes in a file what it is asked."""

    def __init__(self, file: str) -> None:
        self.file, self.turns = Path(file), 0

    def reset(self, row: TaskRow, seed: int) -> str:
        self._note(f"begins {row.question}")
        return row.question

    def step(self, action: str, seed: int) -> tuple[str, float, bool]:
        self._note(action)
        self.turns += 1
        return f"turn {self.turns}: {seed}", len(action) / 10, False

    def _note(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{text!r}\n")
