"""The look of every page: contrast of text in both themes, folds that open in print, tables that fit."""

import re
from itertools import product

from checkout import ROOT

from cflpriv.experiments.report.audit_words import MEANINGS, SIGNS, STATUS
from cflpriv.experiments.report.page import numbering
from cflpriv.experiments.report.pictures import CUT_WORDS, DENSE_INK, IN_THE_DARK, INK, PALETTE, WIDTH, is_wide, new_figure, svg, uri

FOLDER = ROOT / "cflpriv" / "experiments" / "report"
STYLE = re.sub(
    r"/\*.*?\*/", "", (FOLDER / "page.html").read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0], flags=re.S
)
LEAST_CONTRAST = 4.5
"""Of text on its ground: WCAG 2, level AA."""
OKABE_ITO = {"#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"}
GROUNDS = ("page", "panel", "do-ground")
"""What text without a ground of its own may stand on."""


def themes() -> list[dict[str, str]]:
    """The colours by name, of the light and of the dark theme."""
    light, dark = (dict(re.findall(r"--([\w-]+):\s*(#[0-9a-fA-F]{6})", block)) for block in re.findall(r":root\s*\{([^}]*)\}", STYLE))
    return [light, {**light, **dark}]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def text_colours() -> list[tuple[str, str | None]]:
    """Each text colour of the stylesheet, with the ground of its own rule."""
    found = []
    for body in re.findall(r"\{([^{}]*)\}", STYLE):
        colour = re.search(r"(?<![\w-])color:\s*([^;}]+)", body)
        if colour is None:
            continue
        value = colour[1].strip()
        if value == "inherit":
            continue
        named = re.fullmatch(r"var\(--([\w-]+)\)", value)
        assert named, f"color: {value} has no name, so no theme can change it"
        ground = re.search(r"background:\s*var\(--([\w-]+)\)", body)
        found.append((named[1], ground[1] if ground else None))
    return found


def test_contrast_is_known_for_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == 21
    assert contrast("#777777", "#ffffff") < LEAST_CONTRAST < contrast("#767676", "#ffffff")


def test_every_text_can_be_read_on_its_ground_in_both_themes() -> None:
    colours = text_colours()
    assert len(colours) >= 12
    assert {name for name, ground in colours if ground and name != "ink"} >= {"leak-ink", "new-ink", "calm-ink", "still-ink", "doubt-ink"}
    for theme, (name, ground) in product(themes(), colours):
        for behind in (ground,) if ground and name != "ink" else GROUNDS:
            assert contrast(theme[name], theme[behind]) >= LEAST_CONTRAST, f"{name} {theme[name]} on {behind} {theme[behind]}"


def test_the_themes_have_the_same_names_and_edges_have_colours_that_the_colour_blind_distinguish() -> None:
    light, dark = (set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root\s*\{([^}]*)\}", STYLE))
    assert light == dark
    for theme in themes():
        assert {theme["good-edge"], theme["bad-edge"], theme["open-edge"]} <= OKABE_ITO
    assert set(PALETTE) >= OKABE_ITO


def test_print_opens_folds() -> None:
    printed = STYLE.partition("@media print")[2]
    assert "details::details-content" in printed
    assert "content-visibility: visible" in printed


def test_every_status_has_a_sign_and_a_meaning_and_only_what_was_tested_has_a_tick() -> None:
    assert set(SIGNS) == set(MEANINGS) == set(STATUS)
    assert [status for status, sign in SIGNS.items() if sign == "✓"] == ["at_baseline"]
    assert "nothing is known" in MEANINGS["not_attempted"]


def test_no_template_has_a_table_of_more_than_six_columns_or_a_cell_without_a_label() -> None:
    tables = 0
    for path in FOLDER.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        for heads in re.findall(r"heads\((\[.*?\])[,)]", text):
            tables += 1
            assert heads.count('", "') + heads.count(", chosen.by,") <= 5, f"{path.name}: {heads}"
        assert not re.findall(r"<td(?![^>]*data-l=)[^>]*>", text.replace("{% macro td", "")), path.name
    assert tables >= 9


def test_figures_are_numbered_by_section_in_their_order() -> None:
    number = numbering()
    assert [number(1), number(1), number(3), number(1)] == ["1a", "1b", "3a", "1c"]
    assert [number(2) for _ in range(28)][-3:] == ["2z", "2aa", "2ab"]


LEAST_OF_LINES = 3.0
"""Contrast of lines and marks on their ground: WCAG 2, criterion 1.4.11."""


def test_words_and_lines_of_pictures_can_be_read_on_light_and_dark_ground() -> None:
    light, dark = themes()
    turned = {old.partition(": ")[2]: new.partition(": ")[2] for old, new in IN_THE_DARK.items()}
    assert turned["#ffffff"] == dark["panel"]
    assert light["panel"] == "#ffffff"
    for words in (INK, CUT_WORDS):
        assert contrast(words, light["panel"]) >= LEAST_CONTRAST
        assert contrast(turned[words], dark["panel"]) >= LEAST_CONTRAST
    assert min(contrast(DENSE_INK, theme["panel"]) for theme in (light, dark)) >= LEAST_OF_LINES
    assert min(contrast(colour, dark["panel"]) for colour in PALETTE) >= LEAST_OF_LINES


def test_a_picture_has_its_dark_style_and_a_wide_picture_is_scrolled_on_a_phone() -> None:
    pictures = []
    for width in (WIDTH, 2 * WIDTH):
        figure = new_figure(width, 1.0)
        figure.subplots().plot([0, 1], color=INK)
        pictures.append(uri(figure))
    assert [is_wide(picture) for picture in pictures] == [False, True]
    for picture in pictures:
        text = svg(picture)
        assert text.count("prefers-color-scheme: dark") == 1
        assert all(f'[style*="{old}"]' in text for old in IN_THE_DARK)
        assert f"stroke: {INK}" in text.partition("</style>")[2], "the renderer writes styles as the rules look for them"
    assert "img.wide" in STYLE.partition("@media (max-width: 600px)")[2]
