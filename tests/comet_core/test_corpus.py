"""Text becomes the windows that published perplexities use; what cannot be read is named with file and line."""

import gzip
import hashlib
import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from comet_core import corpus as c
from comet_core.text_files import Chat
from comet_cuda.errors import CometError

BOS, EOS, NEWLINE = 256, 257, ord("\n")


@pytest.fixture(autouse=True)
def no_data_and_no_network(monkeypatch):
    monkeypatch.delenv("COMET_DATA", raising=False)
    monkeypatch.setattr(c, "_why_no_hub", lambda: "no network")


def byte_tokenizer(bos: bool = False, eos: bool = True, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character below 256 (token = code point), `<s>` in front where `bos`."""
    vocab = {chr(i): i for i in range(256)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>" if eos else None)
    fast.chat_template = chat_template
    return fast


def text_corpus(*documents: str) -> c.Corpus:
    return c._corpus("mine", documents, "documents joined with two newlines", "file", "whole")


def message(call, *args, **options) -> str:
    with pytest.raises(CometError) as caught:
        call(*args, **options)
    assert caught.value.hint
    return f"{caught.value.message} | {caught.value.hint}"


# --- names and origins --------------------------------------------------------------------------------------------

# The first lines of a wiki.*.raw file, and what the hub's data set has for them (its loader keeps the newline of a
# line with text and empties the others).
RAW = " \n = Robert = \n \n Robert is an actor . \n He acted . \n \n"
ROWS = ["", " = Robert = \n", "", " Robert is an actor . \n", " He acted . \n", ""]


def test_lines_of_the_raw_file_become_the_hubs_rows():
    assert c.wikitext_rows(RAW) == ROWS
    assert c.wikitext_rows(RAW[:-2]) == ROWS[:-1]
    assert c.wikitext_rows("a\x0bb\u2028c\n") == ["a\x0bb\u2028c\n"]  # only a newline ends a line


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=5), max_size=6))
def test_rows_count_lines_and_lose_blank_ones_only(lines):
    rows = c.wikitext_rows("".join(line + "\n" for line in lines))
    assert rows == [line + "\n" if line.strip() else "" for line in lines]


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    (tmp_path / "wikitext-2-raw").mkdir()
    (tmp_path / "wikitext-2-raw" / "wiki.test.raw").write_text(RAW)
    (tmp_path / "wikitext-2-raw" / "wiki.valid.raw").write_text(" valid \n")
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4" / "c4-en-docs.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with gzip.open(tmp_path / "c4" / "c4-en-excerpts.jsonl.gz", "wt") as file:
        file.write('{"text": "three"}\n')
    monkeypatch.setenv("COMET_DATA", str(tmp_path))
    return tmp_path


def test_wikitext_from_the_data_folder_is_joined_as_usual(data_folder):
    found = c.load_corpus("wikitext2", role="perplexity")
    joined = "\n\n = Robert = \n\n\n\n\n Robert is an actor . \n\n\n He acted . \n\n\n"
    assert found.documents == (joined,)
    assert (found.name, found.origin, found.split) == ("wikitext2", "COMET_DATA", "test")
    assert found.joined == "lines joined with two newlines"
    assert found.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    ids = c.perplexity_windows(found, byte_tokenizer(), seq_len=len(joined), windows=None)
    assert "".join(map(chr, ids[0].tolist())) == joined


def test_calibration_and_perplexity_read_different_text(data_folder):
    assert c.load_corpus("wikitext2", role="calibration").documents == (" valid \n",)
    assert c.load_corpus("wikitext2", role="calibration").split == "validation"
    calibration, perplexity = (c.load_corpus("pydoc", role=role) for role in ("calibration", "perplexity"))
    assert not any(one in other or other in one for one in calibration.documents for other in perplexity.documents)
    assert calibration.sha256 != perplexity.sha256 and calibration.origin == "embedded"


def test_c4_takes_whole_documents_first(data_folder):
    found = c.load_corpus("c4", role="calibration")
    assert found.documents == ("one", "two", "three") and found.origin == "COMET_DATA"
    (data_folder / "c4" / "c4-en-excerpts.jsonl.gz").unlink()
    assert c.load_corpus("c4", role="calibration").documents == ("one", "two")


def test_a_wrong_data_folder_is_an_error(monkeypatch):
    monkeypatch.setenv("COMET_DATA", "/absent")
    assert "COMET_DATA is /absent" in message(c.load_corpus, "c4", role="calibration")


@pytest.mark.parametrize("name", ["wikitext2", "c4"])
def test_without_data_and_hub_the_embedded_text_stands_in_with_a_warning(name, caplog):
    c._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="comet"):
        found, _ = (c.load_corpus(name, role="perplexity") for _ in range(2))
    assert (found.name, found.origin, found.split) == ("pydoc", "embedded", "odd topics")
    assert caplog.text.count(f"{name} is not here") == 1 and "COMET_DATA" in caplog.text
    assert c.perplexity_windows(found, byte_tokenizer(), seq_len=2048, windows=4).shape == (4, 2048)


def fake_hub(monkeypatch, sets: dict):
    """Stands in for the hub's client: (data set, configuration, split) -> rows."""
    calls = []

    def load_dataset(dataset, configuration=None, *, split, **options):
        calls.append((dataset, configuration, split, options))
        return sets[(dataset, configuration, split)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(c, "_why_no_hub", lambda: "")
    return calls


def test_the_hub_and_the_data_folder_give_the_same_wikitext(data_folder, monkeypatch):
    local = c.load_corpus("wikitext2", role="perplexity")
    monkeypatch.delenv("COMET_DATA")
    fake_hub(monkeypatch, {("Salesforce/wikitext", "wikitext-2-raw-v1", "test"): [{"text": row} for row in ROWS]})
    hub = c.load_corpus("wikitext2", role="perplexity")
    assert (hub.documents, hub.sha256, hub.origin) == (local.documents, local.sha256, "hub")


def test_c4_from_the_hub_is_streamed_and_bounded(monkeypatch):
    rows = ({"text": str(i)} for i in range(10**9))
    calls = fake_hub(monkeypatch, {("allenai/c4", None, "train"): rows})
    assert len(c.load_corpus("c4", role="calibration").documents) == c.HUB_CALIBRATION_DOCUMENTS
    assert calls[0][3]["streaming"] is True
    fake_hub(monkeypatch, {("allenai/c4", None, "validation"): [{"text": "held out"}]})
    held_out = c.load_corpus("c4", role="perplexity")
    assert held_out.documents == ("held out",) and held_out.split == "validation, first documents"


def test_a_hub_data_set_by_id_and_configuration(monkeypatch):
    rows = [{"text": "a"}, {"messages": [{"role": "user", "content": "b"}]}]
    fake_hub(monkeypatch, {("me/set-v1.5", "plain", "validation"): rows, ("me/bad", None, "train"): [{"x": 1}]})
    found = c.load_corpus("me/set-v1.5:plain", role="perplexity")
    assert found.documents == ("a", Chat((("user", "b"),))) and found.split == "validation"
    assert "me/bad row 0 has neither text nor messages (it has: x)" in message(
        c.load_corpus, "me/bad", role="calibration"
    )
    assert "the hub did not give the data set me/absent" in message(c.load_corpus, "me/absent", role="calibration")


# --- files --------------------------------------------------------------------------------------------------------


def test_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("plain\r\ntext\n", newline="")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "zipped"}')

    def documents(name):
        return c.load_corpus(str(tmp_path / name), role="calibration").documents

    assert documents("a.txt") == ("plain\r\ntext\n",)
    assert documents("a.jsonl") == ("one", Chat((("user", "hi"),)))
    assert documents("a.jsonl.gz") == ("zipped",)
    found = c.load_corpus(str(tmp_path / "a.txt"), role="perplexity")
    assert (found.name, found.origin) == ("a.txt", "file")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', "a.jsonl line 2 has neither text nor messages (it has: txt)"),
        ("a.jsonl", b'{"text": "x"}\n\nnot json', "a.jsonl line 3 is not JSON"),
        ("a.jsonl", b'["x"]', "line 1 has neither text nor messages (it has: list)"),
        ("a.jsonl", b'{"text": 3}', "line 1 has neither"),
        ("a.jsonl", b'{"messages": []}', "line 1 has neither"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1 has a message without"),
        ("a.jsonl", b'{"messages": ["x"]}', "line 1 has a message without"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b"", "a.jsonl holds no text"),
        ("a.jsonl", b'{"text": " "}', "a.jsonl holds no text"),
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b" \n ", "a.txt holds no text"),
        ("a.txt", b"ok \xff\xfe", "a.txt is not UTF-8 text: byte 3"),
        ("a.jsonl.gz", b"no gzip", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 50, mtime=0)[:-9], "cannot read"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in message(c.load_corpus, str(tmp_path / name), role="calibration")


@pytest.mark.parametrize("name", ["absent.txt", "./absent", "wikitxt", "/absent/x.jsonl", "data/absent.jsonl", "a/b/c"])
def test_text_that_is_not_there(name):
    assert f"there is no text file {name}" in message(c.load_corpus, name, role="calibration")


# --- windows ------------------------------------------------------------------------------------------------------


def test_perplexity_windows_follow_one_another():
    text = "".join(chr(97 + i % 26) for i in range(25))
    windows = c.perplexity_windows(text_corpus(text), byte_tokenizer(), seq_len=8, windows=None)
    assert windows.dtype == torch.int64 and windows.shape == (3, 8)
    assert windows.flatten().tolist() == [ord(x) for x in text[:24]]
    first = c.perplexity_windows(text_corpus(text), byte_tokenizer(), seq_len=8, windows=2)
    assert torch.equal(first, windows[:2])


def test_documents_are_joined_with_two_newlines():
    windows = c.perplexity_windows(text_corpus("ab", "cd"), byte_tokenizer(), seq_len=6, windows=None)
    assert windows.tolist() == [[97, 98, NEWLINE, NEWLINE, 99, 100]]


def test_each_window_starts_with_bos_where_the_tokenizer_adds_it():
    tokenizer = byte_tokenizer(bos=True)
    assert c.adds_bos(tokenizer) and not c.adds_bos(byte_tokenizer())
    windows = c.perplexity_windows(text_corpus("abcdefg"), tokenizer, seq_len=4, windows=None)
    assert windows.tolist() == [[BOS, 97, 98, 99], [BOS, 100, 101, 102]]
    calibration = c.calibration_windows(text_corpus("abcdefg"), tokenizer, samples=2, seq_len=4, seed=0)
    assert (calibration[:, 0] == BOS).all() and (calibration[:, 1:] != BOS).all()


def test_calibration_packs_documents_with_eos_and_draws_each_window_once():
    documents = [chr(97 + i) * 5 for i in range(20)]
    packed = [token for d in documents for token in (*map(ord, d), EOS)]
    everything = {tuple(packed[i : i + 8]) for i in range(0, len(packed), 8)}
    drawn = c.calibration_windows(text_corpus(*documents), byte_tokenizer(), samples=15, seq_len=8, seed=1)
    assert drawn.dtype == torch.int64 and {tuple(row) for row in drawn.tolist()} == everything
    again = c.calibration_windows(text_corpus(*documents), byte_tokenizer(), samples=15, seq_len=8, seed=1)
    other = c.calibration_windows(text_corpus(*documents), byte_tokenizer(), samples=15, seq_len=8, seed=2)
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)
    no_eos = c.calibration_windows(text_corpus("ab", "cd"), byte_tokenizer(eos=False), samples=1, seq_len=4, seed=0)
    assert no_eos.tolist() == [[97, 98, 99, 100]]


@pytest.mark.parametrize("bos", [False, True])
def test_what_calibration_read_can_be_left_out(bos: bool):
    documents = [chr(97 + i) * (3 + i % 4) for i in range(20)]
    corpus, tokenizer = text_corpus(*documents), byte_tokenizer(bos=bos)
    how = {"samples": 4, "seq_len": 8, "seed": 1}
    drawn = set(c.calibration_windows(corpus, tokenizer, **how).flatten().tolist())
    rest = c.unread(corpus, tokenizer, **how)
    assert rest.documents == tuple(d for d in documents if ord(d[0]) not in drawn) and 0 < len(rest.documents) < 17
    assert rest.sha256 != corpus.sha256 and rest.split.startswith(f"{len(rest.documents)} of 20 documents, those")
    one = text_corpus("abcdefgh" * 4)  # there is no other document
    rest = c.unread(one, tokenizer, samples=1, seq_len=8, seed=1)
    assert rest.documents == one.documents and rest.split.endswith("read by calibration in part")


def test_too_little_text_says_how_many_windows_there_are():
    corpus, tokenizer = text_corpus("abcdefghij"), byte_tokenizer()
    text = message(c.calibration_windows, corpus, tokenizer, samples=3, seq_len=5, seed=0)
    assert "mine has 2 windows of 5 tokens, 3 were asked for" in text and "--samples to at most 2" in text
    text = message(c.perplexity_windows, corpus, tokenizer, seq_len=4, windows=3)
    assert "2 windows" in text and "--windows to at most 2" in text
    text = message(c.perplexity_windows, corpus, tokenizer, seq_len=11, windows=None)
    assert "10 tokens, fewer than one window of 11" in text and "at most 10" in text
    bos = byte_tokenizer(bos=True)
    assert "at most 11" in message(c.perplexity_windows, corpus, bos, seq_len=12, windows=None)
    assert len(c.perplexity_windows(corpus, bos, seq_len=11, windows=None)) == 1  # the hint holds
    assert "--windows is 0" in message(c.perplexity_windows, corpus, tokenizer, seq_len=4, windows=0)
    assert "hold no text" in message(c.perplexity_windows, corpus, bos, seq_len=1, windows=1)


def test_chats_pass_through_the_chat_template(tmp_path):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    chats = c.load_corpus(str(tmp_path / "a.jsonl"), role="calibration")
    template = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    windows = c.calibration_windows(chats, byte_tokenizer(chat_template=template), samples=1, seq_len=12, seed=0)
    assert "".join(map(chr, windows[0].tolist())) == "[u:hi][a:yo]"
    assert "no chat template" in message(c.calibration_windows, chats, byte_tokenizer(), samples=1, seq_len=4, seed=0)
    refusing = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in message(c.calibration_windows, chats, refusing, samples=1, seq_len=4, seed=0)


def test_random_windows_follow_the_seed():
    first = c.random_windows(50, 3, 16, seed=1)
    assert first.shape == (3, 16) and first.dtype == torch.int64 and first.min() >= 0 and first.max() < 50
    assert torch.equal(first, c.random_windows(50, 3, 16, seed=1))
    assert not torch.equal(first, c.random_windows(50, 3, 16, seed=2))
