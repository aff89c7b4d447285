"""Text by name or file -> token windows, for calibration and for perplexity.

Perplexities compare only if the text is cut in the same way, so the usual rule is kept exactly: the rows of the data
set joined with two newlines, cut into windows that do not overlap. Where the tokenizer starts a text with BOS, every
window starts with it, in calibration and evaluation alike (Gemma is absurd without it).
"""

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from comet_core.text_files import Chat, Document, non_empty, read_documents, read_text, row_document
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Role = Literal["calibration", "perplexity"]

NAMES = ("wikitext2", "c4", "pydoc")
FILE_SUFFIXES = (".txt", ".json", ".jsonl", ".gz", ".raw")  # never the end of a hub data set's id
SEPARATOR = "\n\n"  # between documents in perplexity text
WIKITEXT_FILES = {"perplexity": "wiki.test.raw", "calibration": "wiki.valid.raw"}
C4_FILES = ("c4-en-docs.jsonl", "c4-en-excerpts.jsonl.gz")  # whole documents first, then openings of others
SPLITS: dict[str, tuple[str, ...]] = {"perplexity": ("test", "validation"), "calibration": ("train",)}
HUB_CALIBRATION_DOCUMENTS = 4000  # streamed, so that no whole training set is fetched
C4_SHARDS = {"calibration": ("train", "en/c4-train.00000-of-01024.json.gz"),
             "perplexity": ("validation", "en/c4-validation.00000-of-00008.json.gz")}  # fmt: skip
ORIGIN_HINT = "Set COMET_DATA to a folder with the data, connect to the hub, or give a .txt or .jsonl file."

log = logging.getLogger("comet")


@dataclass(frozen=True)
class Corpus:
    """Text and where it comes from."""

    name: str
    documents: tuple[Document, ...]
    joined: str  # how documents become one text, in words
    sha256: str  # of the documents joined with two newlines, UTF-8; the same from every origin
    origin: str  # COMET_DATA | hub | embedded | file
    split: str


def _corpus(name: str, documents: Iterable[Document], joined: str, origin: str, split: str) -> Corpus:
    kept = tuple(documents)
    texts = [json.dumps(d.messages) if isinstance(d, Chat) else d for d in kept]
    sha256 = hashlib.sha256(SEPARATOR.join(texts).encode("utf-8", "surrogatepass")).hexdigest()
    return Corpus(name, kept, joined, sha256, origin, split)


def load_corpus(name_or_path: str, *, role: Role) -> Corpus:
    """Finds a text.

    Args:
        name_or_path: wikitext2, c4, pydoc, an existing file (.txt, .jsonl, .jsonl.gz), or a hub data set as
            `owner/name` or `owner/name:configuration`.
        role: calibration and perplexity read different splits, so that nothing is judged on what it was fitted to.

    wikitext2 and c4 come from the folder $COMET_DATA (wikitext-2-raw/wiki.test.raw, c4/c4-en-docs.jsonl, ...), else
    from the hub, else the text embedded in Python stands in, with a warning and under its own name.

    Raises:
        CometError: nothing found, or the file cannot be used.
    """
    if name_or_path == "pydoc":
        return _pydoc(role)
    if name_or_path in NAMES:
        return _from_data_folder(name_or_path, role) or _named_from_hub(name_or_path, role)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _corpus(path.name, read_documents(path), "documents joined with two newlines", "file", "whole")
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:.+)?", name_or_path) and path.suffix not in FILE_SUFFIXES
    if path.is_dir() or not is_hub_id:
        known = ", ".join(NAMES)
        raise CometError(f"there is no text file {name_or_path}", f"Give a file, a name ({known}), or a hub data set.")
    return _hub_dataset(name_or_path, role)


def _from_data_folder(name: str, role: Role) -> Corpus | None:
    """wikitext2 or c4 from $COMET_DATA; None if it is not set or lacks the files."""
    setting = os.environ.get("COMET_DATA")
    if not setting:
        return None
    folder = Path(setting).expanduser()
    if not folder.is_dir():
        raise CometError(f"COMET_DATA is {setting}, which is no folder", "Correct it, or unset it to use the hub.")
    if name == "wikitext2":
        path = folder / "wikitext-2-raw" / WIKITEXT_FILES[role]
        if not path.is_file():
            return None
        return _wikitext(wikitext_rows(read_text(path)), role, "COMET_DATA")
    paths = [folder / "c4" / file for file in C4_FILES if (folder / "c4" / file).is_file()]
    documents = [document for path in paths for document in read_documents(path)]
    return _corpus("c4", documents, "documents joined with two newlines", "COMET_DATA", "sample") if documents else None


def wikitext_rows(text: str) -> list[str]:
    """Lines of a wiki.*.raw file as the hub's rows: a line keeps its newline, a blank line is an empty row."""
    lines = text.split("\n")
    rows = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    return [row if row.strip() else "" for row in rows]


def _wikitext(rows: list[str], role: Role, origin: str) -> Corpus:
    """One document: the rows joined as usual, since articles follow one another without a mark."""
    split = "test" if role == "perplexity" else "validation"
    return _corpus("wikitext2", [SEPARATOR.join(rows)], "lines joined with two newlines", origin, split)


def _pydoc(role: Role) -> Corpus:
    """English prose that every Python carries: help topics; even ones calibrate, odd ones are for perplexity.

    Some topics repeat others, whole or in part; only the longest of such texts is taken, so the halves share none.
    """
    from pydoc_data.topics import topics

    kept: list[str] = []
    for text in sorted(topics.values(), key=lambda text: (-len(text), text)):
        if not any(text.strip() in longer for longer in kept):
            kept.append(text)
    texts, split = (kept[::2], "even topics") if role == "calibration" else (kept[1::2], "odd topics")
    return _corpus("pydoc", texts, "documents joined with two newlines", "embedded", split)


def _named_from_hub(name: str, role: Role) -> Corpus:
    try:
        if name == "wikitext2":
            split = "test" if role == "perplexity" else "validation"
            rows = _load_hub("Salesforce/wikitext", "wikitext-2-raw-v1", split=split)
            return _wikitext([str(row["text"]) for row in rows], role, "hub")
        split, file = C4_SHARDS[role]
        shard = _load_hub("allenai/c4", data_files={split: file}, split=split, streaming=True)
        documents = [str(row["text"]) for row in islice(shard, HUB_CALIBRATION_DOCUMENTS)]
        return _corpus("c4", documents, "documents joined with two newlines", "hub", f"{split}, first documents")
    except CometError as error:
        _warn_once(f"warning: {name} is not here ({error.message}); Python's own text stands in. {ORIGIN_HINT}")
        return _pydoc(role)


@cache
def _warn_once(message: str) -> None:
    """A command may read its text several times."""
    log.warning(message)


def _hub_dataset(spec: str, role: Role) -> Corpus:
    dataset, _, configuration = spec.partition(":")
    failure: CometError | None = None
    for split in (*SPLITS[role], "train"):
        try:
            rows = _load_hub(dataset, configuration or None, split=split, streaming=role == "calibration")
        except CometError as error:
            failure = failure or error
            continue
        limit = HUB_CALIBRATION_DOCUMENTS if role == "calibration" else None
        documents = [row_document(row, f"{spec} row {i}") for i, row in enumerate(islice(rows, limit))]
        return _corpus(spec, non_empty(documents, spec), "documents joined with two newlines", "hub", split)
    assert failure is not None
    raise failure


def _load_hub(dataset: str, *configuration: str | None, **options: Any) -> Iterable[dict[str, Any]]:
    """Rows of a hub data set; CometError where the hub cannot give it. No data set's own code is run."""
    reason = _why_no_hub()
    if not reason:
        from datasets import load_dataset

        try:
            rows: Iterable[dict[str, Any]] = load_dataset(dataset, *configuration, **options)
            return rows
        except Exception as error:  # network, unknown id, unknown split, stale scripts: a class for each
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    raise CometError(f"the hub did not give the data set {dataset} ({reason})", ORIGIN_HINT)


def _why_no_hub() -> str:
    """A reason to not even try, found at once, where the hub's client would retry for half a minute."""
    from huggingface_hub import constants

    host = constants.ENDPOINT.split("://")[-1].split("/")[0].split(":")[0]
    has_proxy = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if constants.HF_HUB_OFFLINE or has_proxy:
        return ""  # the client reads its own cache, or the proxy resolves names
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return "no network; HF_HUB_OFFLINE=1 makes it look into its cache"
    return ""


def _text(document: Document, tokenizer: "PreTrainedTokenizerBase", name: str) -> str:
    if isinstance(document, str):
        return document
    if not tokenizer.chat_template:
        raise CometError(f"{name} holds chats, and the model's tokenizer has no chat template", "Give rows with text.")
    messages = [{"role": role, "content": content} for role, content in document.messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise their own errors, for example on the order of roles
        raise CometError(f"{name}: the chat template refuses a chat: {error}", "Correct the chat's roles.") from None


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether this tokenizer starts a text with BOS."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and bool(ids) and ids[0] == tokenizer.bos_token_id


def _windows(ids: list[int], tokenizer: "PreTrainedTokenizerBase", seq_len: int, name: str) -> "Tensor":
    """All windows that do not overlap, int64 [n, seq_len], each starting with BOS where the tokenizer adds it."""
    import torch

    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    fresh = seq_len - len(bos)  # tokens of text a window
    if fresh < 1 or seq_len < 2:
        raise CometError(f"windows of {seq_len} tokens hold no text", "Set --seq-len to 2 or more.")
    count = len(ids) // fresh
    if count == 0:
        raise CometError(
            f"{name} has {len(ids)} tokens, fewer than one window of {seq_len}",
            f"Give more text, or set --seq-len to at most {len(ids) + len(bos)}.",
        )
    body = torch.tensor(ids[: count * fresh], dtype=torch.int64).view(count, fresh)
    return torch.cat([torch.tensor([bos] * count, dtype=torch.int64).view(count, len(bos)), body], dim=1)


def perplexity_windows(
    corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", *, seq_len: int, windows: int | None
) -> "Tensor":
    """The text as windows that do not overlap, in order; the rest that fills none is dropped.

    Args:
        seq_len: tokens a window, BOS included.
        windows: only the first so many; None for all.

    Returns:
        int64 [n, seq_len].

    Raises:
        CometError: less text than asked for.
    """
    text = SEPARATOR.join(_text(document, tokenizer, corpus.name) for document in corpus.documents)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    found = _windows(ids, tokenizer, seq_len, corpus.name)
    if windows is None:
        return found
    return found[: _enough(windows, len(found), seq_len, corpus.name, "--windows")]


def calibration_windows(
    corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", *, samples: int, seq_len: int, seed: int
) -> "Tensor":
    """Windows drawn without replacement: documents, each followed by EOS, packed into one row and cut.

    Returns:
        int64 [samples, seq_len]; the same for the same seed.

    Raises:
        CometError: less text than asked for; says how many windows there are.
    """
    rows = _document_tokens(corpus, tokenizer)
    found = _windows([token for ids in rows for token in ids], tokenizer, seq_len, corpus.name)
    _enough(samples, len(found), seq_len, corpus.name, "--samples")
    return found[_drawn(len(found), samples, seed)]


def _document_tokens(corpus: Corpus, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Tokens of each document, EOS at its end."""
    texts = [_text(document, tokenizer, corpus.name) for document in corpus.documents]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [[*ids, *eos] for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]


def _drawn(count: int, samples: int, seed: int) -> "Tensor":
    """Which of `count` windows calibration takes."""
    import torch

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:samples]


def unread(corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", *, samples: int, seq_len: int, seed: int) -> Corpus:
    """The documents of which `calibration_windows` with the same arguments takes nothing, not even a part; or, if it
    takes something of every one, all of them, under a `split` that says so."""
    import torch

    ends = torch.tensor([len(ids) for ids in _document_tokens(corpus, tokenizer)]).cumsum(0)
    fresh = seq_len - adds_bos(tokenizer)  # tokens of text a window
    starts = fresh * _drawn(int(ends[-1]) // fresh, samples, seed)[:, None]
    read = ((starts < ends) & (starts + fresh > ends - ends.diff(prepend=ends.new_zeros(1)))).any(0).tolist()
    kept = [document for document, taken in zip(corpus.documents, read, strict=True) if not taken]
    if not kept:
        return replace(corpus, split=f"{corpus.split}, read by calibration in part")
    split = f"{len(kept):,} of {len(corpus.documents):,} documents, those that calibration did not read"
    return _corpus(corpus.name, kept, corpus.joined, corpus.origin, split)


def _enough(wanted: int, found: int, seq_len: int, name: str, flag: str) -> int:
    if wanted < 1:
        raise CometError(f"{flag} is {wanted}", "Give 1 or more.")
    if wanted > found:
        raise CometError(
            f"{name} has {found} windows of {seq_len} tokens, {wanted} were asked for",
            f"Set {flag} to at most {found}, shorten --seq-len, or give more text with --data.",
        )
    return wanted


def random_windows(vocab_size: int, samples: int, seq_len: int, seed: int) -> "Tensor":
    """Tokens for random weights, which have no tokenizer: uniform, int64 [samples, seq_len]."""
    import torch

    return torch.randint(vocab_size, (samples, seq_len), generator=torch.Generator().manual_seed(seed))
