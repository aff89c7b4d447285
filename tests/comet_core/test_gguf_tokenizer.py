"""A GGUF file's own words decide what its tokenizer does, whatever transformers makes of the file."""

from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers

from comet_core.gguf_folder import gguf_to_folder
from comet_core.gguf_tokenizer import check_saved_bos, gguf_tokenizer
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

# Scores that a Unigram model would cut otherwise than merging does: "abc" is worth less than "ab" and "c".
PIECES = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -9.0, "a": -7.0, "b": -7.0, "c": -1.0, "ab": -2.0, "abc": -5.0}
CONTROL = {"<unk>", "<s>", "</s>", "<|im_end|>"}
ID = {piece: index for index, piece in enumerate(PIECES)}
BYTES = ["<s>", "</s>", "<|im_end|>", *"123", "Ġ", "12", "123"]


def write(path: Path, architecture: str = "llama", model: str = "llama", pieces=PIECES, **words) -> Path:
    """A file of a vocabulary and no weights; `words` go below tokenizer.ggml."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(pieces))
    writer.add_token_types([3 if piece in CONTROL else 1 for piece in pieces])
    if model == "llama":
        writer.add_token_scores(list(pieces.values()))
    else:
        writer.add_token_merges(["1 2", "12 3"])
        writer.add_block_count(1)
    for name, value in words.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        kind(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def as_earlier_versions(monkeypatch) -> None:
    """transformers makes of every GGUF file what 5.17 makes of Gemma's: Unigram, no BOS."""
    unigram = Tokenizer(models.Unigram(list(PIECES.items()), unk_id=0))
    unigram.normalizer = normalizers.Replace(" ", "▁")
    right = transformers.AutoTokenizer.from_pretrained

    def wrong(folder, *args, gguf_file=None, **options):
        if gguf_file is None:
            return right(folder, *args, **options)
        return transformers.PreTrainedTokenizerFast(tokenizer_object=unigram.__deepcopy__({}), bos_token="<s>")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", wrong)


def encode(path: Path, folder: Path, text: str) -> list[int]:
    """The tokens of a text, by the tokenizer as saved and read again."""
    gguf_tokenizer(path)[0].save_pretrained(folder)
    found: list[int] = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return found


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_files_are_merged_and_begin_with_bos(tmp_path, monkeypatch, architecture):
    as_earlier_versions(monkeypatch)
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    path = write(tmp_path / "x.gguf", architecture, **special, add_bos_token=True, add_space_prefix=False)
    assert encode(path, tmp_path / "out", "abc</s>") == [ID["<s>"], ID["abc"], ID["</s>"]]
    tokenizer, wants_bos = gguf_tokenizer(path)
    assert wants_bos and (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_llama_files_say_whether_a_space_goes_before(tmp_path):
    with_space = write(tmp_path / "x.gguf", bos_token_id=1, unknown_token_id=0)
    assert encode(with_space, tmp_path / "out", "c") == [ID["<s>"], ID["▁"], ID["c"]]  # llama.cpp's defaults
    without = write(tmp_path / "y.gguf", bos_token_id=1, add_bos_token=False, add_space_prefix=False)
    assert encode(without, tmp_path / "out2", "c") == [ID["c"]]


def test_gemma_runs_of_spaces_are_one_token(tmp_path):
    pieces = {"<unk>": 0.0, "<s>": 0.0, "  ": -1000.0, "▁": -3.0, "a": -4.0, "▁a": -1.0}
    path = write(tmp_path / "x.gguf", "gemma3", pieces=pieces, bos_token_id=1, unknown_token_id=0)
    assert encode(path, tmp_path / "out", "a  a a") == [1, 4, 2, 4, 5]


def test_special_tokens_of_other_files_are_the_files(tmp_path, monkeypatch):
    words = {"bos_token_id": 0, "eos_token_id": 2, "padding_token_id": 1, "add_bos_token": True}
    path = write(tmp_path / "x.gguf", model="gpt2", pieces=dict.fromkeys(BYTES, 0.0), **words)
    right = transformers.AutoTokenizer.from_pretrained

    def eos_is_bos(*args, **options):  # what 5.17 makes of Llama files
        tokenizer = right(*args, **options)
        if "gguf_file" in options:
            tokenizer.eos_token, tokenizer.add_bos_token = "<s>", False
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", eos_is_bos)
    tokenizer, _ = gguf_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, 1)
    assert encode(path, tmp_path / "out", "123<|im_end|>") == [0, BYTES.index("123"), 2]


def test_llama_3_files_split_digits_by_three_and_begin_with_bos(tmp_path):
    pieces = dict.fromkeys(BYTES, 0.0)
    path = write(tmp_path / "x.gguf", model="gpt2", pieces=pieces, bos_token_id=0, eos_token_id=1, pre="llama-bpe")
    assert encode(path, tmp_path / "out", "12312") == [0, BYTES.index("123"), BYTES.index("12")]
    parts = gguf_tokenizer(path)[0].backend_tokenizer.pre_tokenizer.pre_tokenize_str("It'll be 12345")
    assert [part for part, _ in parts] == ["It", "'ll", "Ġbe", "Ġ", "123", "45"]


def test_a_bos_that_contradicts_the_file_is_refused(tmp_path):
    path = write(tmp_path / "x.gguf", bos_token_id=1, unknown_token_id=0)
    tokenizer, wants_bos = gguf_tokenizer(path)
    tokenizer.save_pretrained(tmp_path / "right")
    check_saved_bos(path, tmp_path / "right", True)
    tokenizer.add_bos_token = False
    tokenizer.save_pretrained(tmp_path / "wrong")
    with pytest.raises(CometError, match="says that a text begins with BOS"):
        check_saved_bos(path, tmp_path / "wrong", wants_bos)


def test_a_vocabulary_without_scores_or_tokens_is_named(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CometError, match="2 SentencePiece tokens and 0 scores"):
        gguf_tokenizer(tmp_path / "x.gguf")


def test_a_converted_folder_is_checked(tmp_path, monkeypatch):
    from comet_core import gguf_folder

    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))
    path = write(tmp_path / "x.gguf", bos_token_id=1, unknown_token_id=0)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**small, vocab_size=len(PIECES))
    monkeypatch.setattr(gguf_folder, "_load", lambda path: transformers.LlamaForCausalLM(config))
    monkeypatch.setattr(gguf_folder, "_scheme", lambda path: "F16")
    tokenizer, wants_bos = gguf_tokenizer(path)
    tokenizer.add_bos_token = False
    with monkeypatch.context() as patch:
        patch.setattr(gguf_folder, "gguf_tokenizer", lambda path: (tokenizer, wants_bos))
        with pytest.raises(CometError, match="does otherwise"):
            gguf_to_folder(path)
    assert not [entry for entry in (tmp_path / "cache" / "converted").iterdir() if entry.is_dir()]
    assert transformers.AutoTokenizer.from_pretrained(gguf_to_folder(path))("c")["input_ids"][0] == ID["<s>"]


@pytest.mark.slow
def test_gemma_reads_as_it_learned_to(tmp_path, monkeypatch):
    files = list((cache_dir() / "models" / "gemma3-270m").glob("*.gguf"))
    if not files:
        pytest.skip("needs the model gemma3-270m")
    as_earlier_versions(monkeypatch)
    text = "a  b   c\n\n\n  x\ty <h1>z</h1> 1999 <start_of_turn>user\nhi<end_of_turn>"
    head, spaces = [2, 236746, 138, 236763, 139, 236755, 109, 138, 236781, 255968, 236762, 236743], [184, 236802, 191]
    year = [236743, 236770, 236819, 236819, 236819, 236743]
    assert encode(files[0], tmp_path, text) == [*head, *spaces, *year, 105, 2364, 107, 2202, 106]
