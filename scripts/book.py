#!/usr/bin/env python3
"""Preprocessor of `mdbook build`: brings pages that are outside of `docs` into the book.

mdBook writes a chapter to where its path says, so `../README.md` would land beside the book. Such pages get
a place in it. Links are led to where pages are; a link to a file that is no page becomes its text, as on a
printed page.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def chapters(items):
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            yield chapter
            yield from chapters(chapter["sub_items"])


def place(source):
    """Where the page `source`, a path from the root of the repository, is in the book."""
    folder, name = posixpath.split(source)
    if name == "README.md":
        # Of folders outside of `docs`, all in one place, by their names.
        is_outside = folder and not folder.startswith("docs")
        name = f"{posixpath.basename(folder)}.md" if is_outside else "index.md"
    folder = posixpath.relpath(folder, "docs") if folder.startswith("docs") else "."
    return posixpath.normpath(posixpath.join(folder, name))


def relink(text, source, pages):
    """`text` of the page `source` with links that lead to places in the book."""

    def link(match):
        label, target = match.groups()
        file, hash_, anchor = target.partition("#")
        if not file or "://" in file or file.startswith("mailto:"):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        if (ROOT / file).is_dir():
            file = posixpath.join(file, "README.md")
        if file not in pages:
            return label
        start = posixpath.dirname(pages[source]) or "."
        return f"[{label}]({posixpath.relpath(pages[file], start)}{hash_}{anchor})"

    out, code = [], False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            code = not code
        out.append(line if code else LINK.sub(link, line))
    return "\n".join(out)


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    # mdBook 0.4 says `sections`, 0.5 `items`.
    items = book["items"] if "items" in book else book["sections"]
    known = [c for c in chapters(items) if c.get("source_path")]
    source = lambda c: posixpath.normpath("docs/" + c["source_path"].replace("\\", "/"))
    pages = {source(c): place(source(c)) for c in known}
    for chapter in known:
        page = source(chapter)
        chapter["content"] = relink(chapter["content"], page, pages)
        chapter["path"] = pages[page]
    json.dump(book, sys.stdout)


main()
