"""Records -> the tables of a markdown file, written between markers: `python -m comet_core.tables README.md`.

    <!-- table: eval -->
    ...
    <!-- end: eval -->

Records come from results/measured beside the file. A test fails where README's tables are not the generated ones.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from comet_core.layer_times import layer_table
from comet_core.results import Record, attention_table, counters_table, eval_table, gemm_table, read
from comet_core.serving_report import serving_table, step_table
from comet_core.whole_files import write_text
from comet_core.zero_shot_table import zero_shot_table
from comet_cuda.errors import CometError


def is_variant(record: Record) -> bool:
    """Whether a record is of a recipe that was only tried: `base+change`, as comet_core/screen.py calls it."""
    return "+" in record.get("recipe", "")


# marker name -> what stands between the markers
TABLES: dict[str, Callable[[list[Record]], str]] = {
    "eval": lambda records: eval_table([r for r in records if not is_variant(r)]),
    "zero-shot": zero_shot_table,
    "gemm": gemm_table,
    "counters": counters_table,
    "attention": attention_table,
    "steps": step_table,
    "serving": serving_table,
    "layers": layer_table,
}


def fill(text: str, records: list[Record]) -> str:
    """`text` with the lines between each pair of markers replaced by the table of that name."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = pattern.sub(lambda _, b=begin, t=table, e=end: f"{b}\n{t(records)}\n\n{e}", text)  # type: ignore[misc]
    unknown = set(re.findall(r"<!-- table: ([\w-]+) -->", text)) - set(TABLES)
    if unknown:
        raise CometError(f"no table named {', '.join(sorted(unknown))}", f"tables are {', '.join(TABLES)}")
    return text


def main(arguments: list[str]) -> int:
    """Write the tables of the named files anew; records come from results/measured beside each."""
    if not arguments:
        print("usage: python -m comet_core.tables README.md ...", file=sys.stderr)
        return 2
    try:
        for name in arguments:
            path = Path(name)
            records = read(path.parent / "results" / "measured")
            write_text(path, fill(path.read_text(encoding="utf-8"), records))
    except CometError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
