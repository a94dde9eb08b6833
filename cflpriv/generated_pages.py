"""The start that all generated pages of the documentation share: a title, and the line by which a page is known as generated."""

__all__ = ["GENERATED", "generated_page"]

GENERATED = "This page is generated; the command that writes it: "
"""The mark. A page with a line that begins so is generated, and its words are not counted as written by hand."""


def generated_page(title: str, command: str, text: str) -> str:
    """A page in Markdown: `title` without its `#`, the mark with the command, then `text`, which ends in a line break."""
    return f"# {title}\n\n{GENERATED}`{command}`\n\n{text}"
