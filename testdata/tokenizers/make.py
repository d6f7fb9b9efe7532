"""Writes expected.json: ids by the reference packages for more texts, and for made-up tokenizers of every component.

Run with Python 3.11, tokenizers 0.23.3, sentencepiece 0.2.3, tiktoken 0.14.0: python make.py TEXTS
TEXTS is a folder with plain English books and plays in the public domain (*.txt).
"""
import base64
import glob
import json
import random
import sys

import sentencepiece
import tiktoken
from tokenizers import Tokenizer
from tokenizers.normalizers import Sequence  # noqa: F401

random.seed(7)

AWKWARD = [
    "", " ", "  ", "\n", "\t\n \r\n", "a", " a", "a ", "  a  b   c  ", "Hello, World!", "don't I'LL we'Ve",
    "1234567890 3.14 1,000", "x=1;y=2", "foo_bar fooBar FooBAR", "naïve café e\u0301", "ÀÉÎõü ß ﬁ ½ ²",
    "中文字符 漢字 かな カナ 한국어", "Привет мир", "שלום עולם", "مرحبا بالعالم", "नमस्ते", "ไทย", "😀👨‍👩‍👧‍👦🇩🇪",
    "\u0000\u0001\u007f\u0085\u00a0\u2028\u3000\ufeff\ufffd", "\u200b\u200d\u00ad", "....!!!??--", "<s></s><unk>",
    "▁ ▁▁ <0x0A>", "\\n \"quotes\" 'single' `back`", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ＡＢＣ", "a\nb\n\nc\n", "tab\tsep", "İstanbul ΑΣ",
]


def random_text():
    ranges = [(0x20, 0x7E)] * 6 + [(0xA0, 0x24F), (0x370, 0x58F), (0x900, 0x97F), (0x3040, 0x30FF), (0x4E00, 0x9FFF),
              (0xAC00, 0xD7A3), (0x2000, 0x206F), (0x1F300, 0x1F6FF), (0x1, 0x1F), (0x300, 0x36F)]
    out = []
    for _ in range(random.randrange(1, 40)):
        low, high = random.choice(ranges)
        out.append(chr(random.randint(low, high)))
        if random.random() < 0.2:
            out.append(random.choice([" ", "  ", "\n", " \n"]))
    return "".join(out)


def windows(folder):
    for path in sorted(glob.glob(folder + "/**/*.txt", recursive=True))[:12]:
        text = open(path, encoding="utf-8", errors="replace").read()
        for _ in range(2):
            at = random.randrange(max(1, len(text) - 300))
            yield text[at : at + 300]


BYTES = {f"<0x{b:02X}>": b for b in range(256)}
SPELLED = {"type": "BPE", "unk_token": None, "continuing_subword_prefix": "#", "byte_fallback": True, "vocab": BYTES, "merges": []}
RUNS = {
    "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "end_of_word_suffix": "</w>",
    "vocab": {"<unk>": 0, "a": 1, "b": 2, "c": 3, "a</w>": 4, "ab": 5, "abc": 6, "bc": 7, " ": 8, "aa": 9, "b</w>": 10, "ab</w>": 11},
    "merges": ["b c", "a b", "a a", "a bc", "a b</w>"],
}
UNIGRAM = {
    "type": "Unigram", "unk_id": 0,
    "vocab": [["<unk>", 0.0], ["a", -3.0], ["b", -3.5], ["ab", -4.0], ["aba", -5.5], ["▁", -2.0], ["▁a", -2.5], ["lo", -4.0], ["l", -5.0], ["o", -5.0], ["e", -4.5], ["é", -6.0], ["▁the", -3.0], ["the", -4.0], ["he", -5.0], ["t", -5.0], ["h", -5.1]],
}
PIECES = {
    "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10,
    "vocab": {"[UNK]": 0, "a": 1, "##a": 2, "ab": 3, "##b": 4, "hello": 5, "##lo": 6, "hel": 7, ",": 8, "world": 9, "w": 10, "##or": 11, "!": 12, "[CLS]": 13, "[SEP]": 14, "1": 15, "##2": 16, "don": 17, "'": 18, "t": 19},
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def special(id, content, **more):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": content, **flags, **more}


def split(pattern, behavior, invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def made_up():
    """Tokenizers that spell bytes and mark where words begin, so that every component shows in the ids."""
    normalizers = {
        "none": None, "NFC": {"type": "NFC"}, "NFD": {"type": "NFD"}, "NFKC": {"type": "NFKC"}, "NFKD": {"type": "NFKD"},
        "Nmt": {"type": "Nmt"}, "Lowercase": {"type": "Lowercase"}, "StripAccents": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]},
        "Strip": {"type": "Strip", "strip_left": True, "strip_right": True}, "StripLeft": {"type": "Strip", "strip_left": True, "strip_right": False},
        "Prepend": {"type": "Prepend", "prepend": "▁"}, "ByteLevel": {"type": "ByteLevel"},
        "Replace": {"type": "Replace", "pattern": {"String": "l"}, "content": "L"},
        "ReplaceRegex": {"type": "Replace", "pattern": {"Regex": " {2,}|[aeiou]+"}, "content": "_"},
        "Bert": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "BertCased": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": False, "strip_accents": None, "lowercase": False},
        "BertAccents": {"type": "BertNormalizer", "clean_text": False, "handle_chinese_chars": True, "strip_accents": True, "lowercase": False},
    }
    pre_tokenizers = {
        "ByteLevel": BYTE_LEVEL, "ByteLevelPrefix": {**BYTE_LEVEL, "add_prefix_space": True}, "ByteLevelWhole": {**BYTE_LEVEL, "use_regex": False},
        "Whitespace": {"type": "Whitespace"}, "WhitespaceSplit": {"type": "WhitespaceSplit"}, "BertPreTokenizer": {"type": "BertPreTokenizer"},
        "Digits": {"type": "Digits", "individual_digits": True}, "DigitRuns": {"type": "Digits", "individual_digits": False},
        "Delimiter": {"type": "CharDelimiterSplit", "delimiter": "o"}, "Scripts": {"type": "UnicodeScripts"},
        "Fixed": {"type": "FixedLength", "length": 3},
        "SplitInverted": split({"Regex": r"\w+"}, "Removed", True),
        "Sequence": {"type": "Sequence", "pretokenizers": [split({"Regex": r"\p{N}{1,3}"}, "Isolated"), {"type": "Punctuation", "behavior": "Isolated"}, BYTE_LEVEL]},
    }
    for scheme in ("always", "first", "never"):
        for cut in (True, False):
            pre_tokenizers[f"Metaspace {scheme} {cut}"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": cut}
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        pre_tokenizers[f"Punctuation {behavior}"] = {"type": "Punctuation", "behavior": behavior}
        pre_tokenizers[f"Split {behavior}"] = split({"String": "l"}, behavior)
        pre_tokenizers[f"SplitRegex {behavior}"] = split({"Regex": r"\s|[aeiou]"}, behavior)
    for name, normalizer in normalizers.items():
        yield f"normalizer {name}", {"normalizer": normalizer, "model": SPELLED}
    for name, pre_tokenizer in pre_tokenizers.items():
        yield f"pre_tokenizer {name}", {"pre_tokenizer": pre_tokenizer, "model": SPELLED}
    words = {"type": "Whitespace"}
    yield "model BPE", {"pre_tokenizer": words, "model": RUNS}
    yield "model BPE unfused", {"pre_tokenizer": words, "model": {**RUNS, "fuse_unk": False}}
    yield "model BPE ignore_merges", {"pre_tokenizer": words, "model": {**RUNS, "ignore_merges": True}}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    yield "model Unigram", {"pre_tokenizer": metaspace, "model": UNIGRAM}
    yield "model Unigram whole", {"pre_tokenizer": {**metaspace, "split": False}, "model": UNIGRAM}
    yield "model WordPiece", {"normalizer": normalizers["Bert"], "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": PIECES}
    level = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1, "b": 2, "Hello": 3, ",": 4}}
    yield "model WordLevel", {"pre_tokenizer": words, "model": level}
    added = [special(256, "Hello"), special(257, "World", lstrip=True, rstrip=True, special=False), special(258, "don", single_word=True), special(259, "café", normalized=True, special=False), special(260, "<s>"), special(261, "b", rstrip=True), special(262, "fooBar", normalized=True, special=False)]
    yield "added", {"added_tokens": added, "model": SPELLED}
    yield "added normalized", {"added_tokens": added, "normalizer": normalizers["Lowercase"], "pre_tokenizer": BYTE_LEVEL, "model": SPELLED}
    yield "added metaspace first", {"added_tokens": added, "pre_tokenizer": pre_tokenizers["Metaspace first True"], "model": SPELLED}
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<a>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<b>", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<a>": {"id": "<a>", "ids": [1, 2], "tokens": ["<0x01>", "<0x02>"]}, "<b>": {"id": "<b>", "ids": [3], "tokens": ["<0x03>"]}}}
    bert = {"type": "BertProcessing", "sep": ["<0x05>", 5], "cls": ["<0x06>", 6]}
    roberta = {"type": "RobertaProcessing", "sep": ["<0x05>", 5], "cls": ["<0x06>", 6], "trim_offsets": True, "add_prefix_space": True}
    yield "post template", {"post_processor": template, "model": SPELLED}
    yield "post bert", {"post_processor": bert, "model": SPELLED}
    yield "post roberta", {"post_processor": roberta, "model": SPELLED}
    yield "post sequence", {"post_processor": {"type": "Sequence", "processors": [template, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}]}, "model": SPELLED}


def decoders():
    """Decoders, and ids that make them work."""
    tokens = ["▁Hello", "▁", "world", "Ġthe", "Ċ", "a</w>", "b", "##c", ".", "n't", "'s", "<0x41>", "<0xC3>", "<0xA9>", "▁▁x", " y", "do", " not", "|", "<pad>", ",", "</w>"]
    model = {"type": "WordLevel", "unk_token": "b", "vocab": {token: id for id, token in enumerate(tokens)}}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    kinds = {
        "none": None, "ByteLevel": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "Metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "Metaspace never": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
        "WordPiece": {"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece plain": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "BPEDecoder": {"type": "BPEDecoder", "suffix": "</w>"}, "CTC": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        "Llama": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "Strip each": {"type": "Sequence", "decoders": [{"type": "Strip", "content": "▁", "start": 1, "stop": 0}, {"type": "Fuse"}]},
        "Fuse first": {"type": "Sequence", "decoders": [{"type": "Fuse"}, replace, strip]},
        "Replace whole": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "wor"}, "content": "W"}]},
        "Strip ends": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": ".", "start": 0, "stop": 2}]},
    }
    lists = [[0, 2], [0, 1, 2, 8], [3, 4, 3], [5, 6, 7, 5], [6, 7, 8, 9, 10, 6], [11, 12, 13, 0], [14, 15], [16, 17, 17, 18, 19, 19], [2, 8, 8, 8], [1, 0], [6, 20, 6, 10, 5], [5, 21, 5]]
    for name, decoder in kinds.items():
        whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": decoder, "model": model}
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        yield {"name": name, "tokenizer": whole, "ids": lists, "texts": [tokenizer.decode(ids, skip_special_tokens=False) for ids in lists]}


def main():
    texts = AWKWARD + [random_text() for _ in range(60)] + list(windows(sys.argv[1]))
    files = []
    for path in sorted(glob.glob("kitoken/tokenizers/*.json")) + ["simple-stories-bpe4096/tokenizer.json"]:
        tokenizer = Tokenizer.from_file(path)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        files.append({"file": path, "ids": ids})
    for path in sorted(glob.glob("kitoken/sentencepiece/*.model")) + ["../stories260K/tok512.model"]:
        processor = sentencepiece.SentencePieceProcessor(model_file=path)
        files.append({"file": path, "ids": [processor.encode(text) for text in texts]})
    for path in sorted(glob.glob("kitoken/tiktoken/*.tiktoken")):
        name = path.split("/")[-1].removesuffix(".tiktoken")
        lines = (line.split() for line in open(path, "rb"))
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        import tiktoken_ext.openai_public as public

        public.load_tiktoken_bpe = lambda *_, **__: ranks
        encoding = tiktoken.Encoding(**public.ENCODING_CONSTRUCTORS[name]())
        files.append({"file": path, "ids": [encoding.encode_ordinary(text) for text in texts]})
    made = []
    short = AWKWARD + texts[len(AWKWARD) : len(AWKWARD) + 12]
    for name, parts in made_up():
        whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, **parts}
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        made.append({"name": name, "tokenizer": whole, "ids": [tokenizer.encode(text).ids for text in short]})
    out = {"texts": texts, "files": files, "made_up": made, "n_short": len(short), "decoders": list(decoders())}
    with open("expected.json", "w") as file:
        json.dump(out, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


main()
