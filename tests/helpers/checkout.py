"""Where the checkout is, for tests that read its documents, examples and sources."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
