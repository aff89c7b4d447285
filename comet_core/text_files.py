"""A text or JSONL file -> documents. A mistake in a file is named with the file and the line.

`.jsonl` rows hold `text`, or a chat as `messages` ({role, content} each); `.gz` is unpacked; any other file is one
document of plain text.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_cuda.errors import CometError

ROW_HINT = 'Each line is one JSON object: {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'


@dataclass(frozen=True)
class Chat:
    """One conversation, which becomes text through a tokenizer's chat template."""

    messages: tuple[tuple[str, str], ...]  # (role, content)


Document = str | Chat


def read_text(path: Path) -> str:
    """The whole file as text, line ends as they stand.

    Raises:
        CometError: cannot be read, is no UTF-8 text, or is a damaged .gz file.
    """
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CometError(f"{path} is not UTF-8 text: byte {error.start}", "Give .txt, .jsonl or .jsonl.gz.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise CometError(f"cannot read {path}: {error}", "Check the path; fetch the file again if it is cut.") from None


def read_documents(path: Path) -> list[Document]:
    """The documents of a file.

    Raises:
        CometError: the file or one of its rows is unusable, or it holds no text at all.
    """
    content = read_text(path)
    if path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        rows = enumerate(content.split("\n"), start=1)
        documents = [_row(line, f"{path} line {number}") for number, line in rows if line.strip()]
    else:
        documents = [content]
    return non_empty(documents, str(path))


def non_empty(documents: list[Document], where: str) -> list[Document]:
    """The documents that hold text; a CometError if none does."""
    kept = [document for document in documents if isinstance(document, Chat) or document.strip()]
    if not kept:
        raise CometError(f"{where} holds no text", "Give a file with text in it.")
    return kept


def _row(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CometError(f"{where} is not JSON: {error}", ROW_HINT) from None
    return row_document(row, where)


def row_document(row: Any, where: str) -> Document:
    """One row of JSONL or of a hub data set as a document."""
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return str(row["text"])
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        columns = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise CometError(f"{where} has neither text nor messages (it has: {columns or 'nothing'})", ROW_HINT)
    pairs: list[tuple[str, str]] = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise CometError(f"{where} has a message without a role and a text content", ROW_HINT)
        pairs.append((role, content))
    return Chat(tuple(pairs))
