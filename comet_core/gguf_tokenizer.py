"""The tokenizer that a GGUF file describes.

What comes in is the file, what goes out is a tokenizer of transformers. The one decision: the file's own
words decide, whatever the transformers at hand makes of them. Version 5.17 reads Gemma's vocabulary as a Unigram
model without BOS (perplexity 28,132 instead of 22.5) and gives files of the Llama architecture BOS for EOS. So a
SentencePiece vocabulary is built here from transformers' own parts, and every other tokenizer is held to the file's
special tokens, added tokens, Llama 3 split and BOS.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LLAMA_3 = ("llama3", "llama-v3", "llama-bpe")  # what `tokenizer.ggml.pre` calls Llama 3's split
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' word: the file's


def gguf_tokenizer(path: Path) -> "tuple[PreTrainedTokenizerBase, bool | None]":
    """The file's tokenizer, and whether the file wants BOS before a text (None: it has no word on it).

    Raises:
        CometError: the file lacks what its kind of tokenizer needs.
    """
    words = _words(path)
    tokenizer, wanted = _tokenizer(path, words), _adds_bos(words)
    if wanted is not None and wanted != _starts_with_bos(tokenizer):
        tokenizer.add_bos_token = wanted
    return tokenizer, wanted


def check_saved_bos(path: Path, folder: Path, wanted: bool) -> None:
    """Reads back the tokenizer saved in `folder`: a model says nonsense without the BOS it learned with.

    Raises:
        CometError: it does not treat BOS as the file says.
    """
    from transformers import AutoTokenizer

    if wanted != _starts_with_bos(AutoTokenizer.from_pretrained(folder, local_files_only=True)):
        raise CometError(
            f"{path} says that {'a text begins' if wanted else 'no text begins'} with BOS (add_bos_token), and the "
            "tokenizer that transformers makes of it does otherwise",
            "Install another version of transformers, or give the model as a folder of safetensors with its tokenizer.",
        )


def _adds_bos(words: dict[str, Any]) -> bool | None:
    """What the file says of BOS; without a word in it, what llama.cpp does. None: nobody says."""
    if "add_bos_token" in words:
        return bool(words["add_bos_token"])
    return True if "bos_token_id" in words and (words["model"] == "llama" or words.get("pre") in LLAMA_3) else None


def _words(path: Path) -> dict[str, Any]:
    """The file's fields below `tokenizer.ggml.` by their last name, and its architecture."""
    import gguf

    fields = gguf.GGUFReader(str(path)).fields
    words = {name.rpartition(".")[2]: field.contents() for name, field in fields.items() if ".ggml." in name}
    for name in ("model", "tokens"):
        if name not in words:
            raise CometError(
                f"{path} holds no tokenizer (tokenizer.ggml.{name})", "Give the model as a folder with its tokenizer."
            )
    return words | {"architecture": fields["general.architecture"].contents()}


def _tokenizer(path: Path, words: dict[str, Any]) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    ids = {f"{name}_token": words.get(f"{said}_token_id") for name, said in SPECIAL.items()}
    special = {name: words["tokens"][index] for name, index in ids.items() if index is not None}
    tokenizer: Any  # a PreTrainedTokenizerBase; what is set below is no part of its stubs
    if words["model"] == "llama":
        tokenizer = _sentencepiece(path, words, special)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        for name in special.keys() & {"bos_token", "eos_token", "pad_token"}:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(ids[name]))
    _keep_whole(tokenizer, words)
    if words.get("pre") in LLAMA_3:
        _split_like_llama_3(tokenizer)
    return tokenizer  # type: ignore[no-any-return]


def _starts_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _sentencepiece(path: Path, words: dict[str, Any], special: dict[str, str]) -> "PreTrainedTokenizerBase":
    """Byte-pair encoding: merges in the order of the scores; Gemma's in that of the tokens, as not all have a score."""
    from transformers import GemmaTokenizer, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    tokens: list[str] = words["tokens"]
    if len(words.get("scores", ())) != len(tokens):
        raise CometError(
            f"{path} holds {len(tokens)} SentencePiece tokens and {len(words.get('scores', ()))} scores",
            "Fetch the file again, or give the model as a folder of safetensors with its tokenizer.",
        )
    if str(words["architecture"]).startswith("gemma"):
        vocab = {token if token.strip(" ") else "▁" * len(token): index for index, token in enumerate(tokens)}
        merges = generate_merges(vocab, {token: -index for token, index in vocab.items()})
        return GemmaTokenizer(vocab=vocab, merges=merges, **special)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, words["scores"], strict=True)))
    prefix = bool(words.get("add_space_prefix", True))
    return LlamaTokenizer(vocab=vocab, merges=merges, add_prefix_space=prefix, **special)


def _keep_whole(tokenizer: Any, words: dict[str, Any]) -> None:
    """Control and user-defined tokens stay whole in a text, except those that the vocabulary spells in another way."""
    from gguf import TokenType
    from tokenizers import AddedToken

    vocab = tokenizer.get_vocab()
    kinds = zip(words["tokens"], words.get("token_type", ()), strict=False)
    pairs = [(token, kind) for token, kind in kinds if token in vocab]
    for wanted, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t, kind in pairs if kind == wanted])


def _split_like_llama_3(tokenizer: Any) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    split = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
