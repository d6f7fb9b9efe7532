#!/usr/bin/env python3
"""Writes the tables and charts of docs/benchmarks.md from docs/benchmarks.json.

charts.py          writes the tables into the page, between `<!-- table ID -->` and `<!-- end -->`, and
                   docs/benchmarks-ID.svg for those with a peer
charts.py --check  writes nothing, and fails where something isn't what it would write

The file is a list of tables: `columns` name the rows, `measures` what was measured; a row has its names, and for each
measure the runs of ours and those of the peer. Ratios are of means, so that more is better: of measures in `less`, where
less is better, the peer's over ours.
"""

import json
import sys
from html import escape
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "benchmarks.md"
DATA = DOCS / "benchmarks.json"


def runs(values):
    return "; ".join(f"{v:,}" for v in values)


def ratio(table, i, ours, theirs):
    """How much better ours are, or None without a peer."""
    if not ours or not theirs:
        return None
    return fmean(theirs) / fmean(ours) if i in table.get("less", []) else fmean(ours) / fmean(theirs)


def markdown(table):
    """The table as lines of Markdown."""
    peer, us = table.get("peer"), table.get("us", "Sterna")
    head = list(table["columns"])
    for measure in table["measures"]:
        head += [f"{measure}: {us}, {peer}", "ratio"] if peer else [measure]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for names, *measured in table["rows"]:
        cells = list(names)
        for i, (ours, theirs) in enumerate(measured):
            if not peer:
                cells.append(runs(ours))
                continue
            better = ratio(table, i, ours, theirs)
            cells.append(", ".join(runs(v).replace("; ", " / ") for v in (ours, theirs) if v))
            cells.append("" if better is None else f"{better:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def bars(table):
    """What the chart shows: a label and a ratio for each measure of each row with a peer."""
    shown, previous = [], [""] * len(table["columns"])
    for names, *measured in table["rows"]:
        previous = [name or before for name, before in zip(names, previous)]
        units = [f"{n} {c}" if c in ("threads", "clients", "sequences") else n for n, c in zip(previous, table["columns"])]
        for i, (ours, theirs) in enumerate(measured):
            better = ratio(table, i, ours, theirs)
            if better is not None:
                shown.append((", ".join([*units, table["measures"][i]]), better))
    return shown


def chart(table):
    """Ratios as bars, with a line at 1."""
    shown = bars(table)
    left, width, step, top = 330, 360, 22, 34
    most = max(1.2, *(better for _, better in shown))
    height = top + step * len(shown) + 10
    x = lambda value: left + value / most * width
    title = f"{table.get('us', 'Sterna')} to {table['peer']}: more is better, the line is as fast"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 60} {height}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{escape(title)}">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="10" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for i, (label, better) in enumerate(shown):
        y = top + step * i
        color = "#2a6f97" if better >= 1 else "#b5651d"
        out.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<rect x="{left}" y="{y + 2}" width="{x(better) - left:.1f}" height="{step - 6}" fill="{color}"/>')
        out.append(f'<text x="{x(better) + 5:.1f}" y="{y + 14}">{better:.2f}</text>')
    out.append(f'<line x1="{x(1):.1f}" y1="{top - 4}" x2="{x(1):.1f}" y2="{height - 6}" stroke="#000"/>')
    return "\n".join([*out, "</svg>"]) + "\n"


def with_tables(page, tables):
    """The page with each table between its marks. A mark without a table, or a table without one, is an error."""
    lines, left = [], {table["id"]: table for table in tables}
    source = iter(page.splitlines())
    for line in source:
        lines.append(line)
        if line.startswith("<!-- table "):
            name = line.removeprefix("<!-- table ").removesuffix(" -->")
            if name not in left:
                sys.exit(f"{PAGE}: expected a table of {DATA.name} once, found {line!r}")
            while (line := next(source, None)) != "<!-- end -->":
                if line is None:
                    sys.exit(f"{PAGE}: the table {name!r} has no end")
            lines += ["", *markdown(left.pop(name)), "", line]
    if left:
        sys.exit(f"{PAGE}: expected a mark for each table, found none for {', '.join(left)}")
    return "\n".join(lines) + "\n"


def main():
    tables = json.loads(DATA.read_text())
    files = {PAGE: with_tables(PAGE.read_text(), tables)}
    files |= {DOCS / f"benchmarks-{t['id']}.svg": chart(t) for t in tables if t.get("peer")}
    stray = set(DOCS.glob("benchmarks-*.svg")) - set(files)
    if "--check" not in sys.argv[1:]:
        for path, text in files.items():
            path.write_text(text)
        for path in stray:
            path.unlink()
        return
    wrong = [p for p, text in files.items() if not p.is_file() or p.read_text() != text]
    for path in sorted([*wrong, *stray]):
        print(f"{path.relative_to(ROOT)}: isn't what scripts/charts.py writes of docs/{DATA.name}", file=sys.stderr)
    if wrong or stray:
        sys.exit(1)


if __name__ == "__main__":
    main()
