"""Sequence diagrams of the pages as pictures, drawn when the site is built: Mermaid itself would be fetched by the reader's browser.

Knows what the pages use of Mermaid: participants, messages (`->>`, dashed `-->>`), notes over one participant, `opt` or `loop` to `end`.
"""

import re
from html import escape

WIDTH, ROW, TOP = 800, 26, 56
LETTER = 6.8
"""About the width of a letter, of which labels are kept inside the picture."""
FENCE = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(
    r"participant (?P<short>\w+) as (?P<long>.+)|(?P<from>\w+)(?P<arrow>--?>>)(?P<to>\w+): (?P<text>.+)"
    r"|Note over (?P<over>\w+): (?P<note>.+)|(?:opt|loop) (?P<block>.+)|(?P<end>end)"
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page with a picture in place of each diagram."""
    return FENCE.sub(lambda match: picture(match[1]), markdown)


def picture(source: str) -> str:
    """SVG in the page's own colours. Raises `ValueError` for a line that is not known."""
    rows = []
    for line in filter(None, map(str.strip, source.splitlines())):
        if (match := LINE.fullmatch(line)) is None:
            raise ValueError(f"sequence diagram: {line!r} is not known")
        rows.append({name: text for name, text in match.groupdict().items() if text})
    names = {row["short"]: row["long"] for row in rows if "short" in row}
    lanes = {name: WIDTH * (2 * i + 1) / (2 * len(names)) for i, name in enumerate(names)}
    rows = [row for row in rows if "short" not in row]
    height = TOP + ROW * (len(rows) + 1)
    drawn = [f'<line class="lane" x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{height}"/>' for x in lanes.values()]
    for name, long in names.items():
        for number, part in enumerate(long.rsplit("/", 1)):
            drawn.append(_text(lanes[name], 20 + 16 * number, part, "head"))
    opened: list[float] = []
    for i, row in enumerate(rows):
        y = TOP + ROW * (i + 0.8)
        if "block" in row:
            opened.append(y - 14)
            drawn.append(f'<text class="block" x="10" y="{y}">{escape(row["block"])}</text>')
        elif "end" in row:
            top = opened.pop()
            drawn.append(f'<rect class="block" x="4" y="{top}" width="{WIDTH - 8}" height="{y - top - 6}"/>')
        elif "over" in row:
            drawn.append(_text(lanes[row["over"]], y, row["note"], "note"))
        else:
            drawn += _message(lanes[row["from"]], lanes[row["to"]], y, row["text"], row["arrow"] == "-->>")
    label = escape("Sequence diagram: " + ", ".join(names.values()))
    opening = f'<div class="sequence-box"><svg class="sequence" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return f"{opening}{''.join(drawn)}</svg></div>"


def _text(x: float, y: float, text: str, kind: str) -> str:
    half = min(len(text) * LETTER, WIDTH) / 2
    x = min(max(x, half), WIDTH - half)
    return f'<text class="{kind}" x="{x:g}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _message(start: float, stop: float, y: float, text: str, dashed: bool) -> list[str]:
    tip = 7 if stop < start else -7
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return [
        f'<line class="arrow" x1="{start}" x2="{stop}" y1="{y}" y2="{y}"{dash}/>',
        f'<path class="tip" d="M{stop} {y} l{tip} -4 v8 z"/>',
        _text((start + stop) / 2, y - 5, text, "message"),
    ]
